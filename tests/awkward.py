"""Small networks that are awkward to trace, and the building blocks of random ones."""
import math

import torch, torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from truth import stat

class Fn(nn.Module):
    "A module from a function of itself and the inputs, with named submodules and parameters."
    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items(): setattr(self, name, part)
        self.run = forward
    def forward(self, *xs): return self.run(self, *xs)

def P(*shape): return nn.Parameter(torch.randn(*shape)*.5)
def C(i, o, k=3, **kw): return nn.Conv2d(i, o, k, **{'padding': k//2} | kw)

# Building blocks: module(c) or module(c, n) keeps the number of channels and the size of the map, (b, c, h, w), h and w even

class Grouped(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        groups = [g for g in range(1, c+1) if c % g == 0][n % len([g for g in range(1, c+1) if c % g == 0])]
        self.conv = nn.Conv2d(c, c, (1, 3), padding=(0, 1 + n % 2), dilation=(1, 1 + n % 2), groups=groups)
    def forward(self, x): return self.conv(x)

class Transposed(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.down, self.up = nn.Conv2d(c, 2*c, 2, stride=2), nn.ConvTranspose2d(2*c, c, 2, stride=2, groups=1 + n % 2 * (c - 1))
    def forward(self, x): return self.up(self.down(x))

class Shuffle(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.groups = 2 if c % 2 == 0 else c
    def forward(self, x):
        b, c, h, w = x.shape
        return x.view(b, self.groups, c//self.groups, h, w).transpose(1, 2).reshape(b, c, h, w)

class Moves(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.n = n % 6
    def forward(self, x):
        if self.n == 0: return x.flip(1)
        if self.n == 1: return x.roll(1, 1)
        if self.n == 2: return F.pad(x, (0, 0, 0, 0, 1, 0), value=1)[:, :-1] # the first channel is constant
        if self.n == 3: return torch.cat(x.split(1, 1)[::-1], 1)
        if self.n == 4: return F.pixel_unshuffle(F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2), 2)[:, ::4]
        return x[:, torch.arange(x.shape[1]) // 2]

class Residual(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.a, self.b = C(c, c), C(c, c, 1 + n % 2 * 2)
    def forward(self, x): return F.relu(x + self.b(F.relu(self.a(x))))

class Projected(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.a, self.b, self.short = C(c, c + 1), C(c + 1, c, 1), C(c, c, 1)
    def forward(self, x): return F.relu(self.short(x) + self.b(F.relu(self.a(x))))

class Res2(nn.Module):
    "A split whose parts add up in a chain."
    def __init__(self, c, n):
        super().__init__()
        self.parts = min(c, 3)
        self.sizes = [len(p) for p in torch.arange(c).tensor_split(self.parts)]
        self.convs = nn.ModuleList(C(s, t) for s, t in zip(self.sizes, self.sizes[1:]))
    def forward(self, x):
        xs = list(x.split(self.sizes, 1))
        for i, conv in enumerate(self.convs): xs[i+1] = xs[i+1] + conv(xs[i]).relu()
        return torch.cat(xs, 1)

class Gate(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.down, self.up, self.late = C(c, 2, 1), C(2, c, 1), n % 2
    def forward(self, x):
        g = self.up(self.down(F.adaptive_avg_pool2d(x, 1)).relu()).sigmoid()
        return x*g + x if self.late else x.clone().mul_(g)

class Dense(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.convs, self.out = nn.ModuleList(C(c + 2*i, 2) for i in range(1 + n % 3)), C(c + 2*(1 + n % 3), c, 1)
    def forward(self, x):
        xs = [x]
        for conv in self.convs: xs.append(conv(torch.cat(xs, 1)).relu())
        return self.out(torch.cat(xs, 1))

class Tied(nn.Module):
    "The same module twice, and the same weight in another."
    def __init__(self, c, n):
        super().__init__()
        self.a, self.b = C(c, c), C(c, c)
        self.b.weight = self.a.weight
    def forward(self, x): return self.b(self.a(F.relu(self.a(x))).relu())

class Bare(nn.Module):
    "Parameters without a module."
    def __init__(self, c, n):
        super().__init__()
        self.n, self.w = n % 5 if c > 1 else 1, P(c, c) # (einsum with one channel is a mere scale)
    def forward(self, x):
        if self.n == 0: return torch.einsum('bchw,cd->bdhw', x, self.w)
        if self.n == 1: return F.conv2d(x, self.w[:, :, None, None])
        if self.n == 2: return (x.permute(0, 2, 3, 1) @ self.w).permute(0, 3, 1, 2)
        if self.n == 3: return (self.w @ x.flatten(2)).view_as(x)
        return F.linear(x.movedim(1, -1), self.w).movedim(-1, 1)

class InPlace(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.conv, self.half = C(c, max(c//2, 1)), max(c//2, 1)
    def forward(self, x):
        x = x*1
        x[:, :self.half] += self.conv(x)
        x[:, -1:].mul_(2)
        return x.mul_(-.6)

class Glu(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.conv, self.n = C(c, 2*c, 1), n % 2
    def forward(self, x):
        x = self.conv(x)
        if self.n == 0: return F.glu(x, 1)
        a, b = x.chunk(2, 1)
        return a*F.silu(b)

class OptionA(nn.Module):
    "The shortcut of ResNet for CIFAR: subsampled and padded with zeros."
    def __init__(self, c, n):
        super().__init__()
        self.conv, self.back = C(c, c + 2, stride=2), nn.ConvTranspose2d(c + 2, c, 2, stride=2)
    def forward(self, x): return self.back(F.relu(F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1)) + self.conv(x)))

class HandNorm(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.conv, self.scale = C(c, c, 1), P(c, 1, 1)
    def forward(self, x):
        x = self.conv(x)
        mean, var = stat(x.mean(1, keepdim=True)), stat(x.var(1, keepdim=True, correction=0))
        return (x - .9*mean)/(var + 1e-5).sqrt()*self.scale

class Normed(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.conv, self.norm = C(c, c, 1), [nn.BatchNorm2d(c), nn.GroupNorm(1, c), nn.InstanceNorm2d(c)][n % 3]
    def forward(self, x): return F.hardswish(self.norm(self.conv(x)))

class Parametrized(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.conv = [parametrizations.weight_norm, parametrizations.spectral_norm][n % 2](C(c, c, 1 + n % 4 // 2 * 2))
    def forward(self, x): return self.conv(x)

class Standardised(nn.Conv2d):
    def __init__(self, c, n): super().__init__(c, c, 3, padding=1)
    def forward(self, x):
        mean, var = self.weight.mean((1, 2, 3), keepdim=True), self.weight.var((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean)/(var + 1e-5).sqrt(), self.bias, padding=1)

class Blur(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.register_buffer('kernel', torch.tensor([1., 2., 1.]).outer(torch.tensor([1., 2., 1.])).expand(c, 1, 3, 3)/16)
    def forward(self, x): return F.conv2d(x, self.kernel, padding=1, groups=x.shape[1])

class Attention(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.qkv, self.out, self.n = nn.Linear(c, 3*c), nn.Linear(c, c), n % 2
        self.heads = 2 if c % 2 == 0 else 1
    def forward(self, x):
        b, c, h, w = x.shape
        t = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(t).view(b, h*w, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.n: y = F.scaled_dot_product_attention(q, k, v)
        else: y = F.softmax(q @ k.transpose(-1, -2)/math.sqrt(c), -1) @ v
        return (t + self.out(y.transpose(1, 2).flatten(2))).transpose(1, 2).view_as(x)

class Pooled(nn.Module):
    def __init__(self, c, n):
        super().__init__()
        self.n = n % 4
    def forward(self, x):
        if self.n == 0: return F.max_pool2d(x, 3, 1, 1)
        if self.n == 1: return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2)
        if self.n == 2: return F.interpolate(F.avg_pool2d(x, 2), scale_factor=2, mode='bilinear')
        return F.fold(F.unfold(x, 3, padding=1), x.shape[-2:], 3, padding=1)

class MaxMerge(nn.Module):
    "Maxout, and a sum of three."
    def __init__(self, c, n):
        super().__init__()
        self.a, self.b, self.n = C(c, c, 1), C(c, c, 1), n % 3
    def forward(self, x):
        if self.n == 0: return self.a(x) + self.b(x) + x
        if self.n == 1: return torch.stack([self.a(x), self.b(x)]).sum(0)
        return torch.lerp(self.a(x), self.b(x), .3)

blocks = {b.__name__: b for b in (Grouped, Transposed, Shuffle, Moves, Residual, Projected, Res2, Gate, Dense, Tied, Bare,
          InPlace, Glu, OptionA, HandNorm, Normed, Parametrized, Standardised, Blur, Attention, Pooled, MaxMerge)}

class Program(nn.Module):
    """A network from a list of steps (kind, which map, which other map, number), and a head (a number).

    A step takes one or two of the maps made so far and makes one more. Maps have one size and different numbers of channels.
    """
    def __init__(self, channels, steps, head, out=2):
        super().__init__()
        self.steps, self.head, width = steps, head, [channels]
        self.parts, self.stem = nn.ModuleList(), None
        for kind, a, b, n in steps:
            i, j = width[a % len(width)], width[b % len(width)]
            part, size = nn.Identity(), i
            if kind in blocks: part = blocks[kind](i, n)
            elif kind == 'conv': part, size = C(i, 1 + n % 4, 1 + n % 2 * 2), 1 + n % 4
            elif kind == 'cat': size = i + j
            elif kind == 'part': size = max(i // 2, 1)
            elif i != j: part = C(j, i, 1) # add, mul
            self.parts.append(part)
            width.append(size)
        n = width[-1]
        self.fc = nn.Linear(n*16, out) if head % 3 == 0 else nn.Linear(n, out) if head % 3 == 1 else C(n, out, 1)
        self.second = C(width[-2], out, 1) if head % 2 and len(width) > 1 else None
    def forward(self, x):
        maps = [x]
        for part, (kind, a, b, n) in zip(self.parts, self.steps):
            x, y = maps[a % len(maps)], maps[b % len(maps)]
            if kind == 'add': x = x + part(y)
            elif kind == 'mul': x = x * part(y)
            elif kind == 'cat': x = torch.cat([x, y], 1)
            elif kind == 'part': x = x.chunk(2, 1)[n % 2] if x.shape[1] > 1 and x.shape[1] % 2 == 0 else x[:, :max(x.shape[1]//2, 1)]
            else: x = part(x)
            maps.append(F.relu(x) if n % 2 else x)
        x = maps[-1]
        x = self.fc(x.flatten(1)) if self.head % 3 == 0 else self.fc(x.mean((2, 3))) if self.head % 3 == 1 else self.fc(x)
        return (x, {'second': self.second(maps[-2])}) if self.second is not None else x
kinds = [*blocks, 'conv', 'conv', 'cat', 'part', 'add', 'mul']

# Networks that people write: name -> (model, sizes of its inputs); every column of each is compared with autograd

def seq(*parts): return nn.Sequential(*parts)

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.mid, self.c, self.d = C(1, 3), C(3, 4), C(4, 4), C(8, 3), C(6, 2)
        self.up, self.out = nn.ConvTranspose2d(3, 3, 2, stride=2), C(2, 2, 1)
    def forward(self, x):
        a = F.relu(self.a(x))
        b = F.relu(self.b(F.max_pool2d(a, 2)))
        m = F.interpolate(F.relu(self.mid(F.max_pool2d(b, 2))), scale_factor=2, mode='nearest')
        c = F.relu(self.c(torch.cat([b, m], 1)))
        return self.out(self.d(torch.cat([a, self.up(c)], 1)))

class Loop(nn.Module):
    "A recurrent network unrolled in Python; the cell is used at every step."
    def __init__(self, n=3):
        super().__init__()
        self.i, self.h, self.out = nn.Linear(2, n), nn.Linear(n, n, bias=False), nn.Linear(n, 2)
    def forward(self, x):
        h = x.new_zeros(x.shape[0], 3)
        for t in range(x.shape[2]): h = torch.tanh(self.i(x[:, :, t]) + self.h(h))
        return self.out(h)

class Encoder(nn.Module):
    def __init__(self, layer, token=False):
        super().__init__()
        self.patch, self.layer, self.out = nn.Conv2d(1, 4, 2, stride=2), layer, nn.Linear(4, 2)
        self.token = P(1, 1, 4) if token else None
        self.place = P(1, 4 + token, 4)
    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        if self.token is not None: x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.layer(x + self.place)
        return self.out(x[:, 0] if self.token is not None else x.mean(1))

class Mixer(nn.Module):
    def __init__(self, left=False, token=False):
        super().__init__()
        self.patch, self.left, self.token = nn.Conv2d(1, 3, 2, stride=2), left, P(1, 1, 3) if token else None
        n = 4 + token
        self.t1, self.t2 = (P(5, n), P(n, 5)) if left else (nn.Linear(n, 5), nn.Linear(5, n))
        self.c1, self.c2, self.out = nn.Linear(3, 6), nn.Linear(6, 3), nn.Linear(3, 2)
    def mix(self, x): # (b, tokens, channels)
        if self.left: return self.t2 @ F.gelu(self.t1 @ x)
        return self.t2(F.gelu(self.t1(x.transpose(1, 2)))).transpose(1, 2)
    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        if self.token is not None: x = torch.cat([self.token, x], 1)
        x = x + self.mix(F.layer_norm(x, (3,)))
        return self.out((x + self.c2(F.gelu(self.c1(x)))).mean(1))

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
    def forward(self, x): return self.out(self.a(x) if x.pow(2).sum() > 0 else self.b(x))

class CustomReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(min=0)
    @staticmethod
    def backward(ctx, g): return g*.5

class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)
    def forward(self, x): return self.b(CustomReLU.apply(self.a(x)))

class Dynamic(nn.Module):
    "A dynamic convolution: the kernels are mixed by weights that depend on the input."
    def __init__(self):
        super().__init__()
        self.route, self.w, self.out = nn.Linear(2, 3), P(3, 2*2*3*3), nn.Linear(2, 2)
    def forward(self, x):
        w = (self.route(x.mean((2, 3))).softmax(1) @ self.w).view(2, 2, 3, 3)
        return self.out(F.conv2d(x, w, padding=1).relu().mean((2, 3)))

class ManyInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out, self.other = C(1, 2), nn.Linear(3, 2), nn.Linear(4, 2), nn.Linear(2, 3)
    def forward(self, image, table):
        a, b = self.a(image).mean((2, 3)), self.b(table)
        return {'both': self.out(torch.cat([a, b], 1)), 'one': [self.other(a)]}

class Stochastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.out, self.drop = C(2, 2), nn.Linear(2, 2), nn.Dropout2d()
    def forward(self, x):
        keep = 1. if not self.training else torch.bernoulli(torch.full((len(x), 1, 1, 1), .5))
        return self.out((x + keep*self.drop(self.a(x))).mean((2, 3)))

class Ghost(nn.Module):
    "Writes results into a tensor made beforehand, through several views."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = C(2, 2), nn.Conv2d(2, 2, 3, padding=1, groups=2), C(4, 2, 1)
    def forward(self, x):
        y = x.new_empty(len(x), 4, *x.shape[2:])
        y[:, ::2] = self.a(x)
        y[:, 1::2].copy_(self.b(y[:, ::2].clone()))
        y += y.flip(1)
        return self.out(y)

class Heads(nn.Module):
    "A weight for each head, shared by everything in the batch."
    def __init__(self):
        super().__init__()
        self.w, self.out = P(2, 3, 4), nn.Linear(8, 2)
    def forward(self, x): # (b, 6, t)
        y = x.transpose(1, 2).unflatten(2, (2, 3)).transpose(1, 2) # (b, heads, t, 3)
        return self.out(torch.matmul(y, self.w).transpose(1, 2).flatten(2).mean(1))

class Graph(nn.Module):
    "A graph network: a constant matrix mixes nodes, a sum at the target of every edge, channels stay."
    def __init__(self, sparse=False):
        super().__init__()
        a = (torch.arange(25).view(5, 5) % 3 == 0).float()
        self.register_buffer('a', a.to_sparse() if sparse else a)
        self.register_buffer('edges', torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        self.w1, self.w2, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x): # (1, 3, nodes)
        x = F.relu(self.w1(self.a.to(x.dtype) @ x[0].T))
        x = self.w2(torch.zeros_like(x).index_add(0, self.edges[1], x[self.edges[0]]))
        return self.out(x.mean(0, keepdim=True))

class Attend(nn.Module):
    "Attention with class token, other keys and values than queries, and two query heads to a key head."
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out, self.token = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2), P(1, 1, 4)
    def forward(self, x): # (b, 4, t)
        x = torch.cat([self.token, x.transpose(1, 2)], 1)
        q, k, v = (f(x).unflatten(2, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out((x + y.transpose(1, 2).flatten(2))[:, 0])

class Biased(nn.Module):
    "Attention whose scores get a bias that is computed from the input, one for each head."
    def __init__(self):
        super().__init__()
        self.qkv, self.bias, self.out = nn.Linear(3, 12), nn.Linear(5, 2*5), nn.Linear(4, 2)
    def forward(self, x): # (b, 3, 5)
        q, k, v = self.qkv(x.transpose(1, 2)).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        bias = self.bias(x.mean(1)).unflatten(1, (2, 1, 5))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        return self.out(y.transpose(1, 2).flatten(2).mean(1))

class Pruned(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = C(2, 3), nn.Linear(3, 2)
        prune.random_unstructured(self.a, 'weight', .5)
        prune.l1_unstructured(self.b, 'weight', .3)
    def forward(self, x): return self.b(self.a(x).mean((2, 3)))

class Sums(nn.Module):
    "Running sums, cumulative along channels; pooling and a constant matrix along channels."
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(3, 2)
        self.register_buffer('m', torch.eye(6).roll(1, 0)*2 + torch.eye(6))
    def forward(self, x):
        x = self.a(x.cumsum(1)) @ self.m.to(x.dtype)
        return self.b(F.avg_pool1d(x[:, None], 2)[:, 0])

class Aux(nn.Module):
    "An auxiliary head that runs in training only, and one that runs in vain."
    def __init__(self):
        super().__init__()
        self.a, self.aux, self.vain, self.out = C(1, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    def forward(self, x):
        x = self.a(x).mean((2, 3))
        self.vain(x)
        return (self.out(x), self.aux(x)) if self.training else self.out(x)

class Constant(nn.Module):
    "A layer fed by constants: positions through an MLP, queries that are parameters."
    def __init__(self):
        super().__init__()
        self.place, self.a, self.out, self.query, self.q = nn.Linear(2, 4), nn.Linear(3, 4), nn.Linear(4, 2), P(1, 2, 4), nn.Linear(4, 4)
        self.register_buffer('grid', torch.randn(5, 2))
    def forward(self, x): # (b, 3, 5)
        x = self.a(x.transpose(1, 2)) + self.place(self.grid.to(x.dtype))
        x = F.scaled_dot_product_attention(self.q(self.query), x, x)
        return self.out(x.mean(1))

class Squares(nn.Module):
    "Option A of ResNet for CIFAR, a maxout, an addcmul, a lerp by a gate."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.out = C(2, 4, stride=2), C(4, 4), C(4, 4, 1), nn.Linear(4, 2)
    def forward(self, x):
        y = F.relu(self.a(x))
        y = y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1))
        y = torch.maximum(y, self.b(y))
        y = torch.addcmul(y, self.c(y), y.flip(1), value=.5)
        return self.out(torch.lerp(y, self.c(y), self.b(y).sigmoid()).mean((2, 3)))

def tied_autoencoder():
    w = P(3, 5)
    return Fn(lambda self, x: F.linear(F.relu(F.linear(x, self.w)), self.w.t()), w=w)

models = {
    'conv1d': (lambda: seq(nn.Conv1d(2, 4, 3, stride=2, dilation=2), nn.ReLU(), nn.Flatten(), nn.Linear(4*3, 2)), (2, 9)),
    'conv3d': (lambda: seq(nn.Conv3d(1, 2, (1, 3, 2), padding=1), nn.ReLU(), nn.Conv3d(2, 4, 2, groups=2), nn.Flatten(),
                           nn.Linear(4*5*3*4, 2)), (1, 4, 4, 4)),
    'transposed': (lambda: seq(nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), nn.ReLU(),
                               nn.ConvTranspose2d(6, 1, 2), nn.Flatten(), nn.Linear(81, 2)), (4, 4, 4)),
    'convtranspose1d': (lambda: seq(nn.ConvTranspose1d(2, 4, 3, dilation=2), nn.ConvTranspose1d(4, 2, 1, groups=2)), (2, 4)),
    'kernels': (lambda: seq(nn.Conv2d(1, 3, (1, 3)), nn.Conv2d(3, 6, (3, 1), groups=3), nn.Conv2d(6, 2, 3, padding=4, dilation=4)), (1, 6, 6)),
    'shuffle net': (lambda: seq(nn.Conv2d(2, 6, 1), nn.ChannelShuffle(3), nn.Conv2d(6, 6, 3, groups=3), nn.ChannelShuffle(2),
                                nn.Conv2d(6, 2, 1)), (2, 4, 4)),
    'pixel shuffle': (lambda: seq(nn.Conv2d(1, 8, 1), nn.PixelShuffle(2), nn.Conv2d(2, 2, 3), nn.PixelUnshuffle(2), nn.Conv2d(8, 2, 1)), (1, 3, 3)),
    'u-net': (UNet, (1, 8, 8)),
    'unrolled': (Loop, (2, 4)),
    'mha': (lambda: Encoder(Fn(lambda s, x: x + s.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, batch_first=True))), (1, 4, 4)),
    'transformer': (lambda: Encoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=True)), (1, 4, 4)),
    'transformer, token': (lambda: Encoder(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), 2), True), (1, 4, 4)),
    'mixer': (Mixer, (1, 4, 4)),
    'mixer, left': (lambda: Mixer(left=True), (1, 4, 4)),
    'mixer, token': (lambda: Mixer(token=True), (1, 4, 4)),
    'branch': (Branch, (3,)),
    'custom function': (Custom, (3,)),
    'dynamic convolution': (Dynamic, (2, 4, 4)),
    'many inputs': (ManyInputs, (1, 4, 4), (3,)),
    'stochastic depth': (Stochastic, (2, 4, 4)),
    'views': (Ghost, (2, 4, 4)),
    'heads': (Heads, (6, 3)),
    'graph network': (Graph, (3, 5)),
    'sparse matrix': (lambda: Graph(True), (3, 5)),
    'grouped queries': (Attend, (4, 3)),
    'biased attention': (Biased, (3, 5)),
    'pruned': (Pruned, (2, 4, 4)),
    'running sums': (Sums, (4,)),
    'auxiliary heads': (Aux, (1, 4, 4)),
    'constants': (Constant, (3, 5)),
    'option a': (Squares, (2, 4, 4)),
    'tied autoencoder': (tied_autoencoder, (5,)),
    'identities': (lambda: seq(nn.Identity(), seq(nn.Linear(3, 4), nn.Identity(), nn.Dropout(), seq()), nn.Identity(), nn.Linear(4, 2)), (3,)),
    'one module twice': (lambda: seq(*[nn.Linear(3, 3)]*3, nn.ReLU(), nn.Linear(3, 2)), (3,)),
    'global pooling and flatten': (lambda: seq(C(1, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2)), (1, 5, 5)),
    'max pooling': (lambda: seq(C(1, 2), nn.MaxPool2d(3, 2, 1), C(2, 2), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(2, 2)), (1, 6, 6)),
    'padding before pooling': (lambda: seq(C(1, 2), nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(2, 1), nn.ZeroPad2d((3, 0, 2, 3)), C(2, 3, 1),
                                           nn.ZeroPad2d((2, 4, 2, 0)), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(3*5*6, 2)), (1, 3, 3)),
    'two units in a padded channel': (lambda: Fn(lambda s, x: s.out(F.avg_pool2d(F.pad(torch.cat([s.a(x), s.b(x)], 3), (2, 1, 3, 1)), 2, 1).flatten(1)),
                                                 a=C(1, 2), b=C(1, 2), out=nn.Linear(2*5*6, 2)), (1, 2, 2)),
    'upsampling': (lambda: seq(C(1, 2), nn.Upsample(scale_factor=2, mode='bicubic'), C(2, 2), nn.ReflectionPad2d(1), nn.ReplicationPad2d((0, 1, 2, 0)),
                               C(2, 1)), (1, 4, 4)),
    'unfold': (lambda: Fn(lambda s, x: s.fc(F.unfold(s.a(x), 2, padding=1, stride=2).transpose(1, 2)).mean(1), a=C(1, 2), fc=nn.Linear(8, 2)), (1, 4, 4)),
    'fold': (lambda: Fn(lambda s, x: s.b(F.fold(s.a(F.unfold(x, 2, stride=2).transpose(1, 2)).transpose(1, 2), (4, 4), 2, stride=2)),
                        a=nn.Linear(4, 8), b=nn.Conv2d(2, 1, 2, stride=2)), (1, 4, 4)),
    'overlapping fold': (lambda: Fn(lambda s, x: F.linear(F.fold(s.a(x).view(-1, 4, 4), (3, 3), 2).flatten(1), s.w), a=nn.Linear(3, 16), w=P(2, 9)), (3,)),
    'einsum': (lambda: Fn(lambda s, x: torch.einsum('bhtd,hde->bthe', torch.einsum('bct,hcd->bhtd', x, s.a), s.b).flatten(1), a=P(2, 3, 4), b=P(2, 4, 2)), (3, 2)),
    'embedding of positions': (lambda: Fn(lambda s, x: s.b(s.a(x) + s.e(torch.arange(4))), a=nn.Linear(3, 4), b=nn.Linear(4, 2), e=nn.Embedding(4, 4)), (3,)),
    'baddbmm': (lambda: Fn(lambda s, x: torch.baddbmm(s.a(x).transpose(1, 2), s.w[None], x), a=nn.Conv1d(2, 3, 1), w=P(3, 2)), (2, 3)),
}
