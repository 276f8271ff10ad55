"Build the site as plain HTML, without Quarto: `python tools/site.py --out DIR`."
import argparse, ast, html, os, re, shutil
from pathlib import Path

import nbformat, yaml
from latex2mathml.converter import convert
from nbconvert.exporters import HTMLExporter
from nbconvert.filters import Highlight2HTML
from nbconvert.filters.widgetsdatatypefilter import WidgetsDataTypeFilter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbdev.config import get_config
from run_notebooks import directives, root
from make_readme import without_directives

nbs = root/'nbs'

def reading_order():
    "(section, notebooks) as the sidebar has them; the first section is the index alone."
    contents = yaml.safe_load((nbs/'sidebar.yml').read_text())['website']['sidebar']['contents']
    for item in contents:
        if isinstance(item, str): yield '', [nbs/item]
        else:
            patterns = [item['contents']] if isinstance(item['contents'], str) else item['contents']
            found = [p for pattern in patterns for p in sorted(nbs.glob(pattern)) if not p.name.startswith('_')]
            yield item['section'], found

def title_of(path):
    "A notebook's title: its first heading."
    source = next(c.source for c in nbformat.read(path, 4).cells if c.cell_type == 'markdown')
    return re.sub(r'^#\s*', '', source.splitlines()[0])

def page_of(path): return path.relative_to(nbs).with_suffix('.html').as_posix()

def slug(text):
    "The anchor of a heading, as GitHub makes it."
    plain = html.unescape(re.sub('<[^>]+>', '', text)).replace('\u2212', '-').lower()
    return re.sub(r'[^\w -]', '', plain).strip().replace(' ', '-')

class Renderer(IPythonRenderer):
    "Markdown as HTML: formulas as MathML, headings with anchors, links to pages of the site."
    def __init__(self, page, ids):
        super().__init__(escape=False)
        self.page, self.ids = page, ids

    def block_math(self, body): return f'<p class="math">{convert(body, display="block")}</p>'
    def inline_math(self, body): return convert(body)
    def heading(self, text, level, **_):
        same = sum(i == slug(text) for i in self.ids)
        self.ids.append(slug(text))
        name = f'{slug(text)}-{same}' if same else slug(text)
        return f'<h{level} id="{name}">{text}<a class="anchor" href="#{name}" aria-label="link">#</a></h{level}>'
    def link(self, text, url, title=None): return f'<a href="{html.escape(site_link(self.page, url))}">{text}</a>'

def site_link(page, url):
    "Where a link of a notebook leads on the site: another page, a file of the repository, or elsewhere."
    file, _, anchor = url.partition('#')
    place = (page.parent/file).resolve()
    if '://' in url or not file or not place.exists(): return url
    if place.suffix == '.ipynb': return file.removesuffix('.ipynb') + '.html' + ('#' + anchor if anchor else '')
    cfg = get_config(path=root)
    return f'{cfg.git_url}/blob/{cfg.branch}/{place.relative_to(root).as_posix()}'

def only_imports(cell):
    "Whether a cell imports, and says what it hands on, and does nothing else."
    def is_list(n): return isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == '_all_'
    return all(isinstance(n, (ast.Import, ast.ImportFrom)) or is_list(n) for n in ast.parse(cell.source).body)

def shown(cell):
    "A cell as the site shows it, without what its directives hide, and without a module's imports; None if nothing is left."
    found = directives(cell)
    if cell.cell_type not in ('code', 'markdown'): return None
    if cell.cell_type == 'markdown': return dict(cell, metadata={})
    if {'hide', 'default_exp'} & found.keys() or found.get('include') == 'false': return None
    if 'export' in found and only_imports(cell): return None
    outs = [] if found.get('output') == 'false' else cell.get('outputs', [])
    source = '' if found.get('echo') == 'false' else without_directives(cell.source)
    kind = 'exported' if 'export' in found else ''
    if not source and not outs: return None
    return dict(cell, source=source, outputs=outs, alt=found.get('fig-alt'), metadata=dict(tags=[kind] if kind else []))

def alt_texts(cells):
    "For each figure what it shows: its cell's `#| fig-alt:`, else the heading above it."
    heading = ''
    for cell in cells:
        if cell['cell_type'] == 'markdown':
            heading = ([heading] + re.findall(r'^#+ (.*)', cell['source'], re.M))[-1]
            continue
        for out in cell['outputs']:
            if 'image/png' in out.get('data', {}): yield cell['alt'] or f'Figure: {heading}'

def colab(path):
    "A link by which a notebook opens in Colab, if it installs there what it needs."
    if '[ -e /content ] && pip install' not in path.read_text(encoding='utf-8'): return ''
    cfg = get_config(path=root)
    there = cfg.git_url.replace('https://github.com', 'https://colab.research.google.com/github')
    return f'<p class="colab"><a href="{there}/blob/{cfg.branch}/{path.relative_to(root).as_posix()}">Open in Colab</a></p>'

class Exporter(HTMLExporter):
    "nbconvert's HTML, without its second reading as a tree of tags: that takes most of the time, and describes no figure."
    def from_notebook_node(self, nb, resources=None, **kw):
        self.register_filter('highlight_code', Highlight2HTML(pygments_lexer='ipython3', parent=self))
        self.register_filter('filter_data_type', WidgetsDataTypeFilter(notebook_metadata=self._nb_metadata, parent=self, resources=resources))
        return super(HTMLExporter, self).from_notebook_node(nb, self._init_resources(resources), **kw)

def body_of(path):
    "The HTML of a notebook's cells."
    nb = nbformat.read(path, 4)
    cells = [c for c in map(shown, nb.cells) if c]
    alts, ids = alt_texts(cells), []
    exporter = Exporter(template_name='basic', exclude_input_prompt=True, exclude_output_prompt=True,
                        default_preprocessors=[])
    exporter.register_filter('markdown2html', lambda source: MarkdownWithMath(renderer=Renderer(path, ids)).render(source))
    exporter.register_filter('clean_html', lambda text: text) # the notebooks are our own
    body = exporter.from_notebook_node(nbformat.from_dict(dict(nb, cells=cells)))[0]
    body = re.sub(r'<div class=" ?highlight[^>]*><pre><span></span>\s*</pre></div>', '', body) # of cells that show outputs alone
    return re.sub(r'<img(?![^>]*\balt=)', lambda m: f'<img alt="{html.escape(next(alts))}"', body)

def sidebar(path, titles):
    "The list of all pages, seen from one of them."
    parts = []
    for section, pages in titles:
        links = [f'<li><a href="{os.path.relpath(page_of(p), Path(page_of(path)).parent)}"'
                 f'{" aria-current=page" if p == path else ""}>{html.escape(title)}</a></li>' for p, title in pages]
        parts.append((f'<h2>{html.escape(section)}</h2>' if section else '') + f'<ul>{"".join(links)}</ul>')
    return ''.join(parts)

def page(path, titles):
    "A whole page."
    up = '../'*(len(path.relative_to(nbs).parts) - 1)
    title = dict(p for _, pages in titles for p in pages)[path]
    name = get_config(path=root).lib_name
    return f'''<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}{"" if title == name else f" - {name}"}</title><link rel="stylesheet" href="{up}site.css"></head>
<body><input type="checkbox" id="menu" hidden><label for="menu" class="menu">pages</label>
<nav aria-label="pages">{sidebar(path, titles)}</nav><main>{colab(path)}{body_of(path)}</main></body></html>
'''

def build(out):
    "Write all pages, and what they need, into a folder."
    titles = [(section, [(p, title_of(p)) for p in pages]) for section, pages in reading_order()]
    for path in [p for _, pages in titles for p, _ in pages]:
        file = out/page_of(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(path, titles), encoding='utf-8')
    from pygments.formatters import HtmlFormatter
    css = (root/'tools'/'site.css').read_text() + HtmlFormatter(style='default').get_style_defs('.highlight')
    (out/'site.css').write_text(css, encoding='utf-8')
    for file in sorted(nbs.glob('*/[!_]*.html')): # interactive pages, made by notebooks
        (out/file.relative_to(nbs)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, out/file.relative_to(nbs))
    return sum(len(pages) for _, pages in titles)

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=root/'_site', help='folder to write, made if need be')
    out = parser.parse_args().out
    print(f'{build(out)} pages in {out}')

if __name__ == '__main__': main()
