"""An independent truth for a path graph: autograd, with the output of every layer cut to a leaf.

The functions that make layers are replaced while the model runs, so that each result becomes a leaf of autograd. Then the
gradient of a column that a layer reads tells which rows of earlier layers (and which inputs) it is computed from. Nothing
here looks at unit numbers. Activations are made leaky and statistics are detached, so that no dependence hides.
"""
import contextlib
from collections import Counter

import torch, torch.nn.functional as F
from torch import Tensor

class Call:
    "One use of a weight: which entries of its input belong to which column, of its result to which row."
    def __init__(self, name, ids, x, leaf, columns, rows, apply):
        self.name, self.ids, self.x, self.leaf, self.apply = name, ids, x, leaf, apply
        self.columns, self.rows = columns.expand(x.shape), rows.expand(leaf.shape)

def leaves_behind(t):
    "All leaves of autograd that a tensor is computed from."
    if t.grad_fn is None: return {t} if t.requires_grad else set()
    seen, todo, found = set(), [t.grad_fn], set()
    while todo:
        fn = todo.pop()
        if fn is None or fn in seen: continue
        seen.add(fn)
        if hasattr(fn, 'variable'): found.add(fn.variable)
        todo += [f for f, _ in fn.next_functions]
    return found

class Recorder:
    "Runs a model with every layer cut, and keeps the calls."
    def __init__(self, model, inputs):
        self.params = {id(p): (n, p) for n, p in model.named_parameters()}
        self.model, self.calls, self.inputs = model, [], inputs

    def weight_ids(self, w):
        "Name of the parameter behind a weight and, for each entry, its place in it; None for an activation."
        if not isinstance(w, Tensor) or w.ndim < 2: return None
        behind = leaves_behind(w)
        if not behind or not all(id(p) in self.params for p in behind): return None
        for name, p in self.params.values():
            if p.untyped_storage().data_ptr() == w.untyped_storage().data_ptr():
                memory = torch.full((p.numel(),), -1)
                memory.as_strided(p.shape, p.stride()).copy_(torch.arange(p.numel()).view(p.shape))
                return name, memory.as_strided(w.shape, w.stride(), w.storage_offset() - p.storage_offset())
        name, p = max((self.params[id(p)] for p in behind), key=lambda np: (np[1].numel(), np[0]))
        assert p.shape == w.shape, f'the truth cannot tell the entries of {name}'
        return name, torch.arange(p.numel()).view(p.shape)

    def cut(self, name, ids, x, y, columns, rows, apply):
        if not x.requires_grad or all(id(p) in self.params for p in leaves_behind(x)): return y # fed by constants
        leaf = y.detach().clone().requires_grad_()
        self.calls.append(Call(name, ids, x, leaf, columns, rows, apply))
        return leaf*1

    # one method for each kind of layer; `f` is the function as it was

    def linear(self, f, x, w, bias=None):
        found = self.weight_ids(w)
        if found is None: return f(x, w, bias)
        ids = found[1]
        return self.cut(*found, x, f(x, w, bias), ids.amin(0), ids.amin(1), lambda x, w: f(x, w))

    def matmul(self, f, a, b, *rest, **kw):
        left, right = self.weight_ids(a), self.weight_ids(b)
        if (left is None) == (right is None): return f(a, b, *rest, **kw)
        if right: (name, ids), x, apply = right, a, lambda x, w: f(x, w)
        else: (name, ids), x, apply = left, b, lambda x, w: f(w, x)
        columns = ids.amin(-1).unsqueeze(-2) if right else ids.amin(-2).unsqueeze(-1)
        rows = ids.amin(-2, keepdim=True) if right else ids.amin(-1, keepdim=True)
        if x.ndim == 1: columns, rows = columns.flatten(), rows.flatten()
        return self.cut(name, ids, x, f(a, b), columns, rows, apply)

    def added(self, f, bias, a, b, *, beta=1, alpha=1):
        return beta*bias + alpha*self.matmul(torch.matmul if not hasattr(torch.matmul, 'was') else torch.matmul.was, a, b)

    def einsum(self, f, equation, *operands):
        if len(operands) == 1 and isinstance(operands[0], (list, tuple)): operands = operands[0]
        found = [self.weight_ids(t) for t in operands]
        if len(operands) != 2 or sum(x is not None for x in found) != 1: return f(equation, *operands)
        w = next(i for i, x in enumerate(found) if x is not None)
        terms, out = equation.replace(' ', '').split('->')
        terms = terms.split(',')
        name, ids = found[w]
        def keys(term):
            "For each entry of a term: the smallest number of the weights at its letters."
            t, mine = ids, list(terms[w])
            for letter in set(mine) - set(term): t = t.amin(mine.index(letter)); mine.remove(letter)
            t = t.permute([mine.index(l) for l in term if l in mine])
            for d, l in enumerate(term):
                if l not in mine: t = t.unsqueeze(d)
            return t
        apply = (lambda x, v: f(equation, x, v)) if w == 1 else (lambda x, v: f(equation, v, x))
        return self.cut(name, ids, operands[1-w], f(equation, *operands), keys(terms[1-w]), keys(out), apply)

    def conv(self, f, x, w, bias=None, *args, transposed=False, **kw):
        found = self.weight_ids(w)
        if found is None: return f(x, w, bias, *args, **kw)
        groups = kw.get('groups', args[3] if len(args) > 3 else 1)
        block = found[1].flatten(2).unflatten(0, (groups, -1))
        if transposed: block = block.transpose(1, 2)
        space = [1]*(x.ndim - 2)
        return self.cut(*found, x, f(x, w, bias, *args, **kw), block.amin((1, 3)).view(1, -1, *space),
                        block.amin((2, 3)).view(1, -1, *space), lambda x, w: f(x, w, None, *args, **kw))

    @contextlib.contextmanager
    def installed(self):
        "The functions replaced."
        old = []
        def replace(home, name, new):
            f = getattr(home, name)
            wrapped = lambda *args, **kw: new(f, *args, **kw)
            wrapped.was = getattr(f, 'was', f)
            old.append((home, name, f))
            setattr(home, name, wrapped)
        for d in '123':
            replace(F, f'conv{d}d', self.conv)
            replace(F, f'conv_transpose{d}d', lambda f, *a, **k: self.conv(f, *a, transposed=True, **k))
            replace(F, f'max_pool{d}d', leaky_pool(getattr(F, f'avg_pool{d}d')))
            replace(F, f'adaptive_max_pool{d}d', lambda f, x, size, *a, d=d, **k: getattr(F, f'adaptive_avg_pool{d}d')(x, size))
        replace(F, 'linear', self.linear)
        replace(torch, 'einsum', self.einsum)
        for name in ('matmul', 'mm', 'bmm'):
            for home in (torch, Tensor): replace(home, name, self.matmul)
        replace(Tensor, '__matmul__', self.matmul)
        for name in ('addmm', 'baddbmm'):
            for home in (torch, Tensor): replace(home, name, self.added)
        for home, names in leaky.items():
            for name in names: replace(home, name, lambda f, x, *a, **k: F.leaky_relu(x, .7))
        for name in ('maximum', 'minimum'): replace(torch, name, lambda f, a, b: a + .3*b)
        for name in ('layer_norm', 'group_norm', 'instance_norm', 'rms_norm', 'local_response_norm', 'batch_norm', 'normalize'):
            replace(F, name, lambda f, x, *a, **k: x/(x.detach().abs().mean() + .1))
        for home, name in ((F, 'softmax'), (torch, 'softmax'), (Tensor, 'softmax'), (F, 'log_softmax')):
            replace(home, name, lambda f, x, *a, **k: 1 + x/(1 + x.detach().abs()))
        try: yield self
        finally:
            for home, name, f in reversed(old): setattr(home, name, f)

leaky = {F: ('relu', 'relu6', 'hardswish', 'hardsigmoid', 'hardtanh', 'relu_'), torch: ('relu', 'relu_', 'clamp'),
         Tensor: ('relu', 'relu_', 'clamp', 'clamp_')}

def leaky_pool(mean):
    def pool(f, x, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
        return mean(x, kernel_size, stride, padding, ceil_mode)
    return pool

def stat(t):
    "A statistic of a normalisation written by hand: detached while the truth is found."
    return t.detach() if hasattr(torch.matmul, 'was') else t

def record(model, inputs):
    "The calls of a model on inputs (leaves of autograd), and its outputs."
    recorder = Recorder(model, inputs)
    with recorder.installed(): out = model(*inputs)
    return recorder.calls, [t for t in _flat(out) if t.requires_grad]

def _flat(out):
    if isinstance(out, Tensor): return [out]
    out = list(out.values()) if isinstance(out, dict) else out
    return [t for o in out for t in _flat(o)] if isinstance(out, (tuple, list)) else []

# The comparison

class Behind(dict):
    "The inputs and rows of layers behind each unit of a graph, through junctions: unit -> set of units."
    def __init__(self, graph):
        self.children = {}
        for j in graph.junctions:
            for r, c in zip(j.row.tolist(), j.child.tolist()): self.children.setdefault(int(j.dst[r]), []).append(c)

    def __missing__(self, unit):
        todo = [unit] if unit >= 0 else []
        if unit < 0: self[unit] = frozenset()
        while todo: # (no recursion: networks are deep)
            u = todo[-1]
            missing = [c for c in self.children.get(u, ()) if c not in self]
            if missing: todo += missing
            else: self[todo.pop()] = frozenset([u]) if u not in self.children else \
                frozenset().union(*(self[c] for c in self.children[u]))
        return self[unit]

def layer_ids(layer):
    "(G, O, I, K) number of each weight in its parameter."
    return layer.pick(torch.arange(layer.param.numel()).view(layer.param.shape))

def is_filter(layer):
    "Whether the groups of a layer share their weights (a linear layer along positions)."
    return layer.size[0] > 1 and layer.stride is not None and layer.stride[0] == 0

class Comparison:
    "A graph beside the calls of the same model: which unit each leaf entry is, and which each column reads."
    def __init__(self, graph, calls, outputs, inputs):
        self.graph, self.calls, self.outputs, self.inputs = graph, calls, outputs, inputs
        self.base, self.units = Behind(graph), {}
        at = 0
        for x in inputs:
            if not x.is_floating_point(): continue
            shape = [-1 if d == min(1, x.ndim-1) else 1 for d in range(x.ndim)]
            n = x.shape[min(1, x.ndim-1)]
            self.units[x] = torch.arange(at, at+n).view(shape).expand(x.shape)
            at += n
        self.gen = torch.Generator().manual_seed(0)

    def pairs(self):
        "Calls with the layers that they became; None for a call that is not in the graph."
        used, have = Counter(c.name for c in self.calls), Counter(l.name for l in self.graph.layers)
        for name in have: assert have[name] == used[name] or name not in used, \
            f'{name} is a layer {have[name]} times but ran {used[name]} times'
        left = {name: [l for l in self.graph.layers if l.name == name] for name in have}
        return [(c, left[c.name].pop(0) if have[c.name] == used[c.name] else None) for c in self.calls]

    def behind(self, entries, sources):
        "Units behind the given entries of a tensor (a boolean mask), by autograd."
        x, mask = entries
        weights = torch.rand(x.shape, generator=self.gen, dtype=x.dtype) + .5
        grads = torch.autograd.grad((x*weights*mask).sum(), sources, retain_graph=True, allow_unused=True)
        top = max((float(g.abs().max()) for g in grads if g is not None and g.numel()), default=0.)
        found = [self.units[s][g.abs() > 1e-11*top] for s, g in zip(sources, grads) if g is not None]
        return set(torch.cat(found).tolist()) if found else set()

    def check(self, most=10**9):
        "Compare every column (at most `most` a call) and the outputs; the number of columns compared."
        n, sources = 0, [x for x in self.inputs if x in self.units]
        for call, layer in self.pairs():
            if layer is None: # left out: it reads constants, or the output must not depend on it
                if self.behind((call.x, torch.ones_like(call.x)), sources):
                    self.units[call.leaf] = torch.full(call.leaf.shape, -2)
                    sources = sources + [call.leaf]
                continue
            if is_filter(layer): self.check_filter(call, layer, sources)
            else:
                ids = layer_ids(layer)
                unit = dict(zip(ids.amin((2, 3)).flatten().tolist(), layer.dst.flatten().tolist()))
                src = dict(zip(ids.amin((1, 3)).flatten().tolist(), layer.src.flatten().tolist()))
                self.units[call.leaf] = call.rows.clone().apply_(lambda r: unit[r])
                keys = sorted(src)
                if len(keys) > most: keys = [keys[i] for i in torch.randperm(len(keys), generator=self.gen)[:most].tolist()]
                for key in keys:
                    expected = self.base[src[key]]
                    found = self.behind((call.x, call.columns == key), sources)
                    assert found == expected, f'{call.name}, column {key}: reads {self.names(found)}, traced {self.names(expected)}'
                self.check_weights(call, layer, keys[:4] if layer.param.numel() < 10**7 else [])
                n += len(keys)
            sources = sources + [call.leaf]
        self.check_outputs(sources)
        return n

    def check_filter(self, call, layer, sources):
        "A linear layer along positions: every row of its input is one unit, its result is a unit again."
        x, leaf = call.x.reshape(-1, call.x.shape[-1]), call.leaf.reshape(-1, call.leaf.shape[-1])
        swap = call.columns.reshape(x.shape)[:, :1].unique().numel() > 1 # the weight stood on the left
        mask, rows = torch.zeros_like(x), call.x.shape[-1] if swap else len(x)
        groups = {self.base[s]: d for s, d in zip(layer.src[:, 0].tolist(), layer.dst[:, 0].tolist())}
        unit = []
        for r in range(rows):
            mask.zero_()
            if swap: mask[:, r] = 1
            else: mask[r] = 1
            found = frozenset(self.behind((call.x, mask.view(call.x.shape)), sources))
            assert found in groups, f'{call.name}, row {r}: reads {self.names(found)}, traced {[self.names(g) for g in groups]}'
            unit.append(groups[found])
        unit = torch.tensor(unit)
        self.units[call.leaf] = unit.expand(call.leaf.shape) if swap else \
            unit[:, None].expand(leaf.shape).reshape(call.leaf.shape)

    def check_weights(self, call, layer, keys):
        "The weights of a column, of a row and of the kernel positions that see something are where the layer says."
        w = torch.rand(layer.param.shape, generator=self.gen, dtype=call.x.dtype) + .5
        full = torch.full((layer.param.numel(),), 0., dtype=w.dtype)
        ids = layer_ids(layer)
        wide = w.flatten()[call.ids].requires_grad_()
        seen = torch.zeros(layer.size[3], dtype=torch.bool)
        for key in keys:
            x = torch.where(call.columns == key, torch.rand(call.x.shape, generator=self.gen, dtype=w.dtype) + .5, 0.)
            y = call.apply(x, wide)
            got = full.index_put((call.ids.flatten(),), torch.autograd.grad(y.sum(), wide)[0].flatten(), accumulate=True)
            g, i = (ids.amin((1, 3)) == key).nonzero()[0].tolist()
            assert set(got.nonzero().flatten().tolist()) <= set(ids[g, :, i].flatten().tolist()), f'{call.name}: column {key}'
            seen |= (got[ids[g, :, i]] != 0).any(0)
            row = int(ids[g, 0].min())
            y = call.apply(x, wide)
            got = full.index_put((call.ids.flatten(),), torch.autograd.grad((y*(call.rows == row)).sum(), wide)[0].flatten(),
                                 accumulate=True)
            assert set(got.nonzero().flatten().tolist()) <= set(ids[g, 0, i].flatten().tolist()), f'{call.name}: row {row}'
        expected = torch.ones_like(seen) if layer.seen is None else layer.seen
        if keys: assert torch.equal(seen, expected), f'{call.name}: kernel positions {seen.tolist()}, traced {expected.tolist()}'

    def check_outputs(self, sources):
        found = set()
        for out in self.outputs: found |= self.behind((out, torch.ones_like(out)), sources)
        traced = frozenset().union(*(self.base[u] for u in self.graph.outputs.tolist()))
        assert found == traced, f'outputs depend on {self.names(found)}, traced {self.names(traced)}'

    def names(self, units):
        "Units in words."
        def name(u):
            for l in self.graph.layers:
                if bool((l.dst == u).any()): return f'{l.name}[{(l.dst.flatten() == u).nonzero()[0].item()}]'
            return f'input[{u}]' if u >= 0 else 'a layer left out'
        return '{' + ', '.join(map(name, sorted(units))) + '}'

def compare(model, *sizes, most=10**9, example=None, **kwargs):
    "Trace a model and compare the sources of every column with autograd; the graph, and the number of columns."
    from phew_nb.graph import trace
    torch.manual_seed(0)
    model = model.double().eval()
    for p in model.parameters(): p.requires_grad_()
    inputs = [t.clone() for t in example] if example else [torch.randn(1, *s, dtype=torch.double) for s in sizes]
    graph = trace(model, example=tuple(t.clone() for t in inputs), **kwargs)
    leaves = [x.requires_grad_() if x.is_floating_point() else x for x in inputs]
    calls, outputs = record(model, leaves)
    return graph, Comparison(graph, calls, outputs, leaves).check(most)
