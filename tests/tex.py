"LaTeX tables: compiled where LaTeX is at hand, else read by a parser."
import re, shutil, subprocess
from functools import lru_cache

@lru_cache
def program():
    "The name of a LaTeX that has the package which the tables need; None where there is none."
    if shutil.which('tectonic'): return 'tectonic'
    if not (shutil.which('pdflatex') and shutil.which('kpsewhich')): return None
    return 'pdflatex' if subprocess.run(['kpsewhich', 'booktabs.sty'], capture_output=True).stdout.strip() else None

def faults(text):
    "What is wrong with tables, as far as one sees without LaTeX: braces, environments, dollars, columns, bare signs."
    bare = re.sub(r'\\\\|\\[{}$&%#_^~]', '', text) # without what is escaped
    depths, found = [0], []
    for sign in re.findall('[{}]', bare): depths.append(depths[-1] + (1 if sign == '{' else -1))
    if min(depths) < 0 or depths[-1]: found.append('braces do not match')
    names = [re.findall(rf'\\{word}{{(\w+)}}', text) for word in ('begin', 'end')]
    if sorted(names[0]) != sorted(names[1]): found.append('environments do not match')
    if bare.count('$') % 2: found.append('a dollar is left open')
    if re.search('[%#]', bare): found.append('a bare % or #')
    for columns, body in re.findall(r'\\begin{tabular}{(\w+)}(.*?)\\end{tabular}', text, re.S):
        rows = [row for row in body.replace(r'\\', '\n').splitlines() if '&' in row]
        wrong = [row for row in rows if len(re.findall(r'(?<!\\)&', row)) != len(columns) - 1]
        found += [f'{len(columns)} columns are announced, and not in {row!r}' for row in wrong]
    return found

def check(text, folder):
    "Raise AssertionError where a table would not compile."
    assert r'\begin{tabular}' in text and not faults(text), faults(text)
    if program() is None: return
    page = r'\documentclass{article}\usepackage{booktabs}\begin{document}' + f'\n{text}\n' + r'\end{document}'
    (folder/'table.tex').write_text(page, encoding='utf-8')
    how = ['-interaction=nonstopmode', '-halt-on-error'] if program() == 'pdflatex' else []
    run = subprocess.run([program(), *how, 'table.tex'], cwd=folder, capture_output=True, text=True, errors='replace')
    assert run.returncode == 0 and (folder/'table.pdf').exists(), run.stdout[-1500:] + run.stderr[-500:]
