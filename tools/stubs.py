"""What `@patch` adds to classes, for programs that read types: `python tools/stubs.py --out DIR` writes stubs, `--check`
runs pyright on a copy of the modules that sees those methods."""
import argparse, ast, copy, json, re, shutil, subprocess, sys, tempfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
package = root/'phew_nb'
# basic, less three rules, each with the reason why it finds no faults here
loose = dict(
    ArgumentType='`density: float=None` says that it may be left out, and PyTorch, pandas and fastai take more than they declare',
    CallIssue='the same, where functions are chosen by name from a table, or arguments are handed on as a dictionary',
    UnsupportedDunderAll='names of later modules are given when they are asked for, by `__getattr__`')
# module -> places that pyright cannot follow (what a tensor subclass, a tracer or fastai adds when it runs): never more
known = dict(
    arrays=5, baselines=3, blocks=1, checkpoints=3, draws=1, export=3, flow=1, graph=3, grow=5, keeping=11,
    linearised=9, lines=3, looks=1, masks=4, metrics=2, models=3, nodes=5, numbers=2, operations=6, plots=4,
    reach=2, rules=2, scores=2, state=2, steps=4, tape=8, training=8, walks=4)
settings = dict(include=['phew_nb'], ignore=['phew_nb/_added.pyi'], typeCheckingMode='basic', pythonVersion='3.11',
                strictParameterNoneValue=False) | {f'report{rule}': False for rule in loose}

def is_patch(decorator):
    "The arguments of a decorator `patch`; None for any other."
    call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
    if isinstance(call.func, ast.Name) and call.func.id == 'patch': return {k.arg for k in call.keywords}

def without_body(f, decorators=()):
    "The signature of a function and its docstring."
    f, doc = copy.deepcopy(f), ast.get_docstring(f)
    f.body = [ast.Expr(ast.Constant(doc))] if doc else []
    f.body.append(ast.Expr(ast.Constant(...)))
    f.decorator_list = [ast.Name(d) for d in decorators] or f.decorator_list
    return f

def patches(tree):
    "(class, method as it would stand there, the function) for each function that `@patch` puts into a class."
    for f in tree.body:
        if not isinstance(f, ast.FunctionDef): continue
        for how in filter(lambda h: h is not None, map(is_patch, f.decorator_list)):
            made = without_body(f, ['property'] if 'as_prop' in how else ['classmethod'] if 'cls_method' in how else [])
            if not how & {'as_prop', 'cls_method'}: made.decorator_list = []
            first, made.args.args[0].annotation = made.args.args[0].annotation, None
            for name in (n.id for n in ast.walk(first) if isinstance(n, ast.Name)): yield name, made, f

def imports(tree):
    "The imports of a module."
    return [n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))]

def declared(node):
    "The names that a class itself gives."
    names = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    names |= {t.id for n in node.body if isinstance(n, ast.Assign) for goal in n.targets for t in ast.walk(goal)
              if isinstance(t, ast.Name)}
    return names | {f.name for f in node.body if isinstance(f, ast.FunctionDef)}

def attributes(functions, known):
    "What methods set on `self`, with the type of the argument that it is set to, if it is one."
    known = set(known)
    for f in functions:
        types = {a.arg: a.annotation for a in f.args.args}
        for t in (t for n in ast.walk(f) if isinstance(n, ast.Assign) for goal in n.targets for t in ast.walk(goal)):
            if not (isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == 'self'): continue
            if t.attr in known: continue
            known.add(t.attr)
            yield ast.AnnAssign(ast.Name(t.attr), types.get(t.attr) or ast.Name('Any'), None, 1)

def methods_of(node): return [f for f in node.body if isinstance(f, ast.FunctionDef)]

def class_stub(node, added):
    "A class without the bodies of its methods, and with the methods that other cells and modules add."
    made = copy.deepcopy(node)
    made.body = [without_body(n) if isinstance(n, ast.FunctionDef) else n for n in node.body]
    made.body += [*attributes(methods_of(node), declared(node)), *added]
    return made

def stub(tree, added, more):
    "The stub of a module; `added`: class -> methods, `more`: imports that those need."
    body = [ast.parse('from typing import Any').body[0], *more]
    for n in tree.body:
        if isinstance(n, ast.ClassDef): body.append(class_stub(n, added.get(n.name, [])))
        elif isinstance(n, ast.FunctionDef):
            if all(is_patch(d) is None for d in n.decorator_list): body.append(without_body(n))
        elif isinstance(n, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)): body.append(n)
    return ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))

def read(folder=package):
    "Module name -> its tree."
    return {p.stem: ast.parse(p.read_text(encoding='utf-8')) for p in sorted(folder.glob('*.py')) if p.stem != '_modidx'}

def grown(trees):
    "Module -> class -> the methods added to it; and module -> imports that they need, of the modules they stand in."
    classes = {n.name: n for tree in trees.values() for n in tree.body if isinstance(n, ast.ClassDef)}
    homes = {n.name: m for m, tree in trees.items() for n in tree.body if isinstance(n, ast.ClassDef)}
    added, more = {}, {}
    for module, tree in trees.items():
        for name, method, f in patches(tree):
            if name not in homes: continue
            there = added.setdefault(homes[name], {}).setdefault(name, [])
            own = declared(classes[name]) | {n.name for n in there if isinstance(n, ast.FunctionDef)}
            own |= {a.target.id for a in [*attributes(methods_of(classes[name]), ()), *there] if isinstance(a, ast.AnnAssign)}
            there += [*attributes([f], own), method]
            if module != homes[name]: more.setdefault(homes[name], {})[module] = imports(tree)
    return added, {m: [n for part in parts.values() for n in part] for m, parts in more.items()}

def stubs(folder=package):
    "File name -> text, for each module with a class that grows by `@patch`."
    trees = read(folder)
    added, more = grown(trees)
    return {f'{m}.pyi': stub(trees[m], classes, more.get(m, [])) + '\n' for m, classes in added.items()}

def write(out):
    "Write the stubs into a folder, beside the modules."
    for name, text in stubs().items(): (Path(out)/name).write_text(text, encoding='utf-8')

def mixins(folder=package):
    "One module of stubs with a class of the added methods for each class that grows."
    trees = read(folder)
    added, _ = grown(trees)
    body = [ast.parse('from typing import Any').body[0]]
    body += [n for m in trees for n in imports(trees[m]) if m not in ('all', '__init__', '__main__')]
    body += [ast.parse(f'from .{m} import *').body[0] for m in trees if m not in ('all', '__init__', '__main__')]
    for classes in added.values():
        for name, methods in classes.items():
            body.append(ast.ClassDef(f'{name}_', [], [], methods, [], type_params=[]))
    text = ast.unparse(ast.fix_missing_locations(ast.Module(body, [])))
    return text + '\n' + fastai_callback, [n for c in added.values() for n in c]

fastai_callback = 'class Callback_:\n    learn: Any\n' # fastai says None of it, which no callback meets

def seen_whole(place):
    "A copy of the modules, line for line, in which each class that grows has its added methods; returns its folder."
    shutil.copytree(package, place/'phew_nb', ignore=shutil.ignore_patterns('*.pyi', '__pycache__', '_modidx.py'))
    text, names = mixins()
    for name, said in {'_added.pyi': text, '_added.py': ''}.items(): (place/'phew_nb'/name).write_text(said, encoding='utf-8')
    head, callback = re.compile(rf'^class ({"|".join(names)})(?:\((.*?)\))?:', re.M), re.compile(r'^(class \w+\()(.*Callback\))', re.M)
    for path in (place/'phew_nb').glob('*.py'):
        source = path.read_text(encoding='utf-8')
        new = head.sub(lambda m: f'class {m[1]}(_added.{m[1]}_{", " + m[2] if m[2] else ""}):', source)
        new = re.sub(r'^@patch\(.*\)$', '@patch', new, flags=re.M) # fastcore declares its argument as None
        new = callback.sub(r'\1_added.Callback_, \2', new)
        if new != source: # (on the docstring's line: the numbers of lines stay)
            path.write_text(re.sub(r'^(""".*?""")$', r'\1; from . import _added', new, count=1, flags=re.M), encoding='utf-8')
    (place/'pyrightconfig.json').write_text(json.dumps(settings))
    return place

def findings():
    "What pyright says of each module, line by line; and all of its output, where it did not come to an end."
    with tempfile.TemporaryDirectory() as place:
        seen_whole(Path(place))
        run = subprocess.run(['pyright', '--pythonpath', sys.executable], cwd=place, capture_output=True, text=True)
    said = re.findall(r'(phew_nb/(\w+)\.py:.* - error: .*)', run.stdout)
    if not said and ' 0 errors' not in f' {run.stdout}': return {'': [run.stdout + run.stderr]}
    return {m: [line for line, module in said if module == m] for _, m in said}

def check():
    "What pyright says of the modules, by file and line, where it is more than is known."
    return [line for m, lines in findings().items() if len(lines) > known.get(m, 0) for line in lines]

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, help='a folder of modules, where the stubs are written')
    parser.add_argument('--check', action='store_true', help='run pyright')
    parser.add_argument('--all', action='store_true', help='run pyright, and print what is known too, with its counts')
    args = parser.parse_args()
    if args.out: write(args.out)
    if args.all:
        found = findings()
        print(*(line for lines in found.values() for line in lines), {m: len(lines) for m, lines in sorted(found.items())}, sep='\n')
    if not args.check: return
    found = check()
    print(*found, sep='\n')
    sys.exit(bool(found))

if __name__ == '__main__': main()
