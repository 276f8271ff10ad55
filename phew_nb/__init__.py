"Sparse networks from random walks biased by weight magnitude: PHEW, what it is compared with, and what measures them."
__version__ = "0.2.0"

import ast, inspect, sys
from importlib.machinery import PathFinder, SourceFileLoader

def _comment(line):
    "What stands behind the last `# ` of a line of a signature."
    return line.rpartition('# ')[2].strip() if '# ' in line else ''

def _signature(lines):
    "A function's definition and the lines that it takes, from some lines of source on."
    for n in range(len(lines)):
        code = [line.partition(' # ')[0].rstrip() for line in lines[:n + 1]]
        if code[-1].endswith((':', '...')) or ': return' in code[-1] or n > 40:
            try: return ast.parse('\n'.join(code).strip() + (' pass' if code[-1].endswith(':') else '')).body[0], lines[:n + 1]
            except SyntaxError: pass
    return None, []

def _told(f, lines):
    "What the comments of a signature say of arguments and result."
    given = [a for a in [*f.args.posonlyargs, *f.args.args, f.args.vararg, *f.args.kwonlyargs, f.args.kwarg] if a]
    said = {ast.unparse(a): _comment(lines[a.lineno - 1]) for a in given if a.arg not in ('self', 'cls')}
    size, result = max(map(len, said), default=0), ast.unparse(f.returns) if f.returns else ''
    if lines[-1].lstrip().startswith(')') or not said: result = ': '.join(filter(None, [result, _comment(lines[-1])]))
    text = [f'  {name:{size}}  {what}'.rstrip() for name, what in said.items()] if any(said.values()) else []
    return '\n'.join([*(['\nArguments:', *text] if text else []), *([f'\nResult: {result}'] if result else [])])

def _functions(module):
    "A module's own public functions, and the methods that it gives to classes, its own or others'."
    classes = [o for o in vars(module).values() if isinstance(o, type) and o.__module__.startswith(f'{__name__}.')]
    for holder in [module, *classes]:
        for name, made in list(vars(holder).items()):
            made = next((g for n in ('__func__', 'fget', 'f') if (g := getattr(made, n, None))), made) # (`f`: fastcore's)
            if not inspect.isfunction(made) or made.__module__ != module.__name__: continue
            if made.__code__.co_filename == module.__file__ and (name == '__init__' or name[0] != '_'): yield made

def _document(module):
    "Bring the comments on arguments and results into the docstrings of a module's functions and methods."
    with open(module.__file__, encoding='utf-8') as f: lines = f.read().splitlines()
    for made in {id(f): f for f in _functions(module)}.values():
        start = made.__code__.co_firstlineno - 1
        start = next((n for n in range(start, min(start + 9, len(lines))) if lines[n].lstrip().startswith('def ')), None)
        if start is None: continue
        tree, own = _signature(lines[start:start + 45])
        if isinstance(tree, ast.FunctionDef): made.__doc__ = f'{made.__doc__ or ""}\n{_told(tree, own)}'.strip() or None

class _Loader(SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        if 'nbdev.showdoc' not in sys.modules: _document(module) # which shows the comments itself

class _Finder:
    "So that `help` tells of a function as much as its notebook does."
    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name.startswith(f'{__name__}.') else None
        if spec and type(spec.loader) is SourceFileLoader: spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec

if _Finder not in sys.meta_path: sys.meta_path.insert(0, _Finder)
