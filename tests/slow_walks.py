"""A second sampler: slow, in plain Python, written from the rules alone.

A `Net` is a list of layers and joins between named units. It is written by hand from a module's own weights
(`Net.conv`, `Net.join`), or read from a path graph where writing it by hand would be as awkward as the network. `Law`
gives the distribution of every step of a walk, and from it single walks, all paths with their probabilities, the
probability that a walk visits each weight, and the probability that pruning keeps it.
"""
import itertools, math
from collections import defaultdict
from functools import lru_cache

END = 'end'

class Net:
    "Units, and between them layers (weights) and joins (no weights), in the order in which they run."
    def __init__(self, inputs):
        self.inputs, self.outputs, self.nodes, self.sizes = list(inputs), [], [], {}

    def _layer(self, name, size, src, dst, entries):
        "`src[g][i]`: unit of a column, `dst[g][o]`: of a row; `entries[g, o, i, k]`: (weight, place in the parameter)."
        self.nodes.append(('layer', name, src, dst, entries))
        self.sizes[name] = size
        return [u for group in dst for u in group]

    def conv(self, name, weight, src, groups=1, mask=None):
        "A linear layer or a convolution of `groups`: `weight` (out, in/groups, ...). Returns its units."
        O, I = weight.shape[0] // groups, weight.shape[1]
        table = lambda t: t.reshape(*weight.shape[:2], -1).tolist()
        w, m = table(weight.detach().double()), None if mask is None else table(mask)
        K, call = len(w[0][0]), sum(n[0] == 'layer' for n in self.nodes)
        entries = {(g, o, i, k): (w[g*O + o][i][k], ((g*O + o)*I + i)*K + k)
                   for g in range(groups) for o in range(O) for i in range(I) for k in range(K)
                   if m is None or m[g*O + o][i][k]}
        dst = [[f'{name}/{call}.{g*O + o}' for o in range(O)] for g in range(groups)]
        return self._layer(name, weight.numel(), [src[g*I:(g+1)*I] for g in range(groups)], dst, entries)

    def join(self, *branches, skip=None, kind='add'):
        "Units merged from those of the branches, one by one; branch number `skip` goes around weighted layers."
        at = len(self.nodes)
        dst = [f'{kind}/{at}.{n}' for n in range(len(branches[0]))]
        self.nodes.append(('join', [(u, d, b == skip) for b, units in enumerate(branches) for u, d in zip(units, dst)]))
        return dst

    @classmethod
    def of(cls, graph, masks=None):
        "The net of a path graph."
        net = cls(graph.inputs.tolist())
        net.outputs = graph.outputs.tolist()
        for node in graph.nodes:
            if hasattr(node, 'src'): net._read(node, None if masks is None else masks.get(node.name))
            else: net.nodes.append(('join', [(c, int(node.dst[r]), s) for r, c, s in
                                             zip(node.row.tolist(), node.child.tolist(), node.skip.tolist())]))
        return net

    def _read(self, node, mask):
        import torch
        number = node.pick(torch.arange(node.param.numel()).view(node.param.shape))
        ok = None if mask is None else node.pick(mask)
        w, number, ok = node.weight().double().tolist(), number.tolist(), None if ok is None else ok.tolist()
        src = [[None if u < 0 else u for u in group] for group in node.src.tolist()]
        entries = {(g, o, i, k): (w[g][o][i][k], number[g][o][i][k])
                   for g, o, i, k in itertools.product(*map(range, node.size)) if ok is None or ok[g][o][i][k]}
        self._layer(node.name, node.param.numel(), src, node.dst.tolist(), entries)

    def links(self, skips):
        "(unit, unit) of everything that a walk may follow."
        for node in self.nodes:
            if node[0] == 'layer':
                _, _, src, dst, entries = node
                yield from ((src[g][i], dst[g][o]) for g, o, i in {e[:3] for e in entries} if src[g][i] is not None)
            else: yield from ((a, b) for a, b, skip in node[1] if skips or not skip)

    def live(self, skips):
        "Units on a complete path."
        after, before = defaultdict(set), defaultdict(set)
        for a, b in self.links(skips): after[a].add(b); before[b].add(a)
        def reach(units, table):
            seen, todo = set(units), list(units)
            while todo:
                for u in table[todo.pop()] - seen: seen.add(u); todo.append(u)
            return seen
        return reach(self.inputs, after) & reach(self.outputs, before)

def masses(values, power):
    "What each of some numbers is drawn by, and their sum: only the ratios of the first matter."
    values = [abs(v) for v in values]
    if power == 0: return [1.]*len(values), len(values)
    if not any(values): return [1.]*len(values), math.inf if -math.inf < power < 0 else 0.
    best = max(values) if power > 0 else min(values)
    if math.isinf(power): return [float(v == best) for v in values], best
    if best == 0: return [float(v == 0) for v in values], math.inf
    shares = [(v/best)**power for v in values]
    return shares, sum(shares)*best**power

class Law:
    "The distribution of every step."
    def __init__(self, net, power=1, fork='uniform', skips=False):
        self.net, self.power, self.fork, self.skips, self.alive = net, power, fork, skips, net.live(skips)
        self.rows = {True: defaultdict(list), False: defaultdict(list)} # unit -> its rows: (node, entries)
        self.ways = {True: defaultdict(list), False: defaultdict(list)} # unit -> (unit, skip)
        for n, node in enumerate(net.nodes):
            if node[0] == 'layer': self._add_rows(n, *node[2:])
            else:
                for a, b, skip in node[1]:
                    if a in self.alive and b in self.alive and (skips or not skip):
                        self.ways[True][a].append((b, skip)); self.ways[False][b].append((a, skip))
        self.moves = lru_cache(None)(self._moves)
        self.mass = lru_cache(None)(self._mass)

    def _add_rows(self, n, src, dst, entries):
        rows = {True: defaultdict(list), False: defaultdict(list)}
        for (g, o, i, k), (w, place) in entries.items():
            a, b = src[g][i], dst[g][o]
            if a in self.alive and b in self.alive:
                rows[True][g, i].append((w, (g, o, i, k), b)); rows[False][g, o].append((w, (g, o, i, k), a))
        for forward, ends in (True, src), (False, dst):
            for (g, line), row in rows[forward].items(): self.rows[forward][ends[g][line]].append((n, row))

    def entries(self, row):
        "[(probability, entry)] of one row, and its mass."
        if self.power >= 0 or abs(self.power) == math.inf: edges = [[e] for e in row]
        else: # first the edge, then the weight in its kernel
            kernels = defaultdict(list)
            for e in row: kernels[e[1][:3]].append(e)
            edges = list(kernels.values())
        shares, mass = masses([sum(abs(e[0]) for e in edge) for edge in edges], self.power)
        out = []
        for edge, share in zip(edges, shares):
            inside = masses([e[0] for e in edge], self.power)[0]
            out += [(share/sum(shares)*x/sum(inside), e) for x, e in zip(inside, edge)]
        return out, mass

    def _alternatives(self, unit, forward):
        "[(mass, what)] at a unit."
        out, layers = [], defaultdict(list)
        for n, row in self.rows[forward][unit]: layers[n].append(row)
        for n, rows in layers.items(): out.append((sum(self.entries(row)[1] for row in rows), ('layer', n, rows)))
        for other, skip in self.ways[forward][unit]:
            out.append((1. if skip else self.mass(other, forward), ('join', other)))
        if unit in (self.net.outputs if forward else self.net.inputs): out.append((1., (END,)))
        return out

    def _mass(self, unit, forward): return sum(m for m, _ in self._alternatives(unit, forward))

    def _moves(self, unit, forward):
        "[(probability, weight or None, next unit or END)] of one step from a live unit."
        ways, out = self._alternatives(unit, forward), []
        mass = [m for m, _ in ways]
        if self.fork == 'uniform' or not any(mass): mass = [1.]*len(ways)
        if math.inf in mass: mass = [float(m == math.inf) for m in mass]
        for m, (kind, *what) in zip(mass, (w for _, w in ways)):
            p = m/sum(mass)
            if kind == END: out.append((p, None, END))
            elif kind == 'join': out.append((p, None, what[0]))
            else:
                n, rows = what
                out += [(p*q/len(rows), (n, *at), b) for row in rows for q, (_, at, b) in self.entries(row)[0]]
        return [(p, w, b) for p, w, b in out if p > 0]

    def starts(self, forward): return [u for u in (self.net.inputs if forward else self.net.outputs) if u in self.alive]

    def start(self, walk, direction='both'):
        "(unit, forward) from which walk number `walk` starts."
        forward = walk % 2 == 0 if direction == 'both' else direction == 'forward'
        starts = self.starts(forward)
        return starts[(walk // 2 if direction == 'both' else walk) % len(starts)], forward

    def walk(self, unit, forward, rng):
        "One walk: its weights."
        out = []
        while unit != END:
            moves = self.moves(unit, forward)
            _, weight, unit = rng.choices(moves, [m[0] for m in moves])[0]
            if weight is not None: out.append(weight)
        return out

    def paths(self, unit, forward, most=100_000):
        "{weights of a path, in order of their layers: probability} of all walks from a unit."
        out, todo = defaultdict(float), [(1., unit, ())]
        while todo:
            p, unit, path = todo.pop()
            if unit == END: out[tuple(sorted(path))] += p
            else: todo += [(p*q, b, path if w is None else (*path, w)) for q, w, b in self.moves(unit, forward)]
            if len(out) > most: raise ValueError('too many paths')
        return dict(out)

    def visits(self, unit, forward):
        "{weight: probability that a walk from `unit` uses it}, and {unit: probability that it comes by}."
        at, weights = defaultdict(float, {unit: 1.}), defaultdict(float)
        for u in self._in_time(forward):
            if at[u] == 0: continue
            for p, w, b in self.moves(u, forward):
                if w is not None: weights[w] += at[u]*p
                if b != END: at[b] += at[u]*p
        return weights, at

    @lru_cache(None)
    def _in_time(self, forward):
        order = list(self.net.inputs)
        for node in self.net.nodes:
            if node[0] == 'layer': order += [u for group in node[3] for u in group]
            else: order += dict.fromkeys(b for _, b, _ in node[1])
        return [u for u in (order if forward else reversed(order)) if u in self.alive]

    # pruning

    def place(self, weight):
        "(parameter, place in it) of a weight; the same for weights that are shared."
        n, *at = weight
        return self.net.nodes[n][1], self.net.nodes[n][4][tuple(at)][1]

    def conserved(self, weights, granularity='weight'):
        "Places that a walk over `weights` conserves."
        if granularity == 'weight': return frozenset(map(self.place, weights))
        kernels = {w[:4] for w in weights}
        return frozenset(self.place((n, *at)) for n in {w[0] for w in weights} for at in self.net.nodes[n][4]
                         if (n, *at[:3]) in kernels)

    def prune(self, target, rng, direction='both', granularity='weight'):
        "Places held by the smallest number of whole walks that hold `target`, and the number of walks."
        kept = set()
        for walk in itertools.count():
            if len(kept) >= target: return kept, walk
            kept |= self.conserved(self.walk(*self.start(walk, direction), rng), granularity)

    def after(self, walks, direction='both', granularity='weight'):
        "{place: probability that it is held after so many walks}, exactly."
        miss = defaultdict(lambda: 1.)
        starts = defaultdict(int)
        for walk in range(walks): starts[self.start(walk, direction)] += 1
        for (unit, forward), n in starts.items():
            hit = defaultdict(float)
            for path, p in self.paths(unit, forward).items():
                for place in self.conserved(path, granularity): hit[place] += p
            for place, p in hit.items(): miss[place] *= max(1 - p, 0)**n
        return {place: 1 - p for place, p in miss.items()}

    def inclusion(self, target, direction='both', granularity='weight', rest=1e-12):
        "{place: probability that pruning to `target` keeps it}, {number of walks: probability}, over all sets."
        keys = {}
        bit = lambda place: 1 << keys.setdefault(place, len(keys))
        laws = {}
        for walk in range(2*len(self.net.inputs)*len(self.net.outputs)):
            start = self.start(walk, direction)
            if start not in laws:
                laws[start] = defaultdict(float)
                for path, p in self.paths(*start).items():
                    laws[start][sum(map(bit, self.conserved(path, granularity)))] += p
        open_, done, walks = {0: 1.}, defaultdict(float), defaultdict(float)
        for walk in itertools.count():
            left = sum(open_.values())
            if left < rest: break
            after = defaultdict(float)
            for held, p in open_.items():
                for more, q in laws[self.start(walk, direction)].items():
                    new = held | more
                    if new.bit_count() < target: after[new] += p*q
                    else: done[new] += p*q
            open_ = after
            walks[walk + 1] = left - sum(open_.values())
        return {place: sum(p for s, p in done.items() if s >> b & 1) for place, b in keys.items()}, dict(walks)
