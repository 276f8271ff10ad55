"Make README.md from nbs/index.ipynb: `python tools/make_readme.py [--check]`."
import os, re, sys
from base64 import b64decode
from pathlib import Path

from execnb.nbio import read_nb
from nbdev.config import get_config
from run_notebooks import directives, root

index = root/'nbs'/'index.ipynb'
images = Path('docs_img') # the pictures of the README, beside it

def fenced(text, lang=''): return f'```{lang}\n{text.rstrip()}\n```'

def without_directives(source): return '\n'.join(l for l in source.splitlines() if not re.match(r'#\s*\|', l)).strip()

def relink(text):
    "Links to files beside the index, as seen from the README."
    local = lambda m: '](' + os.path.normpath(f'nbs/{m[1]}') if (root/'nbs'/m[1].split('#')[0]).is_file() else m[0]
    return re.sub(r'\]\(([^)\s]+)', local, text)

def output_block(out, cell, pictures):
    "A stored output as Markdown; a PNG is added to `pictures` and linked."
    data = out.get('data', {})
    if out.output_type == 'stream': return fenced(''.join(out.text)) if out.name == 'stdout' else ''
    if 'text/markdown' in data: return relink(''.join(data['text/markdown']))
    if 'image/png' not in data: return fenced(''.join(data.get('text/plain', '')))
    name = images/f'{cell.id}-{len(pictures)}.png'
    pictures[name] = b64decode(''.join(data['image/png']))
    return f'![{directives(cell).get("fig-alt", "")}]({name.as_posix()})'

def cell_blocks(cell, pictures):
    "The Markdown blocks of a cell: its text, or its code and outputs, less what its directives hide."
    if cell.cell_type == 'markdown': return [relink(cell.source)]
    found = directives(cell)
    if cell.cell_type != 'code' or {'hide', 'default_exp'} & found.keys() or found.get('include') == 'false': return []
    code = '' if found.get('echo') == 'false' else without_directives(cell.source)
    outs = [] if found.get('output') == 'false' else cell.get('outputs', [])
    return [fenced(code, 'python') if code else '', *(output_block(o, cell, pictures) for o in outs)]

def with_owner(text):
    "Addresses of this repository as `settings.ini` has them, whoever owned it before."
    cfg = get_config(path=root)
    return re.sub(rf'https://github\.com/[\w.-]+/{cfg.repo}(?![\w-])', cfg.git_url, text)

def readme():
    "The text of the README, and its pictures by path."
    pictures, blocks = {}, ['<!-- Made from nbs/index.ipynb by tools/make_readme.py: edit there. -->']
    for cell in read_nb(index).cells: blocks += cell_blocks(cell, pictures)
    return with_owner('\n\n'.join(b for b in blocks if b) + '\n'), pictures

def main():
    text, pictures = readme()
    addressed = [index, *sorted(index.parent.glob('tutorials/*.ipynb'))]
    own = {p.relative_to(root): with_owner(p.read_text(encoding='utf-8')).encode() for p in addressed}
    files = {**own, Path('README.md'): text.encode(), **pictures}
    old = {p.relative_to(root) for p in (root/images).glob('*.png')} - files.keys()
    stale = sorted(old | {p for p,b in files.items() if not (root/p).exists() or (root/p).read_bytes() != b})
    if '--check' in sys.argv[1:]:
        if stale: sys.exit(f'not as nbs/index.ipynb has it: {", ".join(map(str, stale))}; run python tools/make_readme.py')
        return
    for p in old: (root/p).unlink()
    for p in stale:
        if p in files: (root/p).parent.mkdir(exist_ok=True); (root/p).write_bytes(files[p])

if __name__ == '__main__': main()
