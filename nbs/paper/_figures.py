"""The look of the figures in the paper notebooks: one column wide, colours that colour-blind readers can tell apart."""
import matplotlib.pyplot as plt

# Okabe and Ito's palette, without its yellow (too light for lines)
COLORS = dict(blue='#0072B2', orange='#E69F00', green='#009E73', red='#D55E00', pink='#CC79A7', sky='#56B4E9',
              black='#000000')
COLUMN = 3.4   # inches, the width of a column

plt.rcParams.update({
    'figure.figsize': (COLUMN, 2.4), 'figure.dpi': 150, 'savefig.dpi': 150, 'figure.constrained_layout.use': True,
    'font.size': 8, 'axes.titlesize': 8, 'axes.labelsize': 8, 'legend.fontsize': 7,
    'xtick.labelsize': 7, 'ytick.labelsize': 7, 'axes.spines.top': False, 'axes.spines.right': False,
    'axes.grid': True, 'grid.alpha': .25, 'legend.frameon': False,
    'lines.linewidth': 1.3, 'lines.markersize': 3.5, 'axes.prop_cycle': plt.cycler(color=list(COLORS.values()))})

def panels(n, height=2.4, **kwargs):
    "A row of `n` axes, each one column wide up to two; returns figure and axes."
    width = COLUMN if n == 1 else 2 * COLUMN
    return plt.subplots(1, n, figsize=(width, height), **kwargs)

def draw_mlp(ax, weights, fmt='{:g}', names=('inputs', 'hidden', 'outputs')):
    "Draw a small fully-connected network; `weights` is a list of (outputs, inputs) arrays, zeros are left out."
    sizes = [w.shape[1] for w in weights] + [weights[-1].shape[0]]
    place = lambda layer, unit: (layer, (sizes[layer] - 1) / 2 - unit)
    for layer, w in enumerate(weights):
        for (out, inp), value in ((ij, w[ij]) for ij in zip(*w.nonzero())):
            (x0, y0), (x1, y1) = place(layer, inp), place(layer + 1, out)
            ax.plot([x0, x1], [y0, y1], color='.5', zorder=1)
            at = .2 + .15 * (inp % 2) + .07 * (out % 2)
            if fmt: ax.text(x0 + at * (x1 - x0), y0 + at * (y1 - y0), fmt.format(value), fontsize=7, ha='center',
                            va='center', bbox=dict(facecolor='white', edgecolor='none', pad=.6))
    for layer, size in enumerate(sizes):
        heights = [place(layer, u)[1] for u in range(size)]
        ax.scatter([layer] * size, heights, s=70, color=COLORS['sky'], edgecolor='k', zorder=2)
    for layer, name in zip([0, (len(sizes) - 1) / 2, len(sizes) - 1], names):
        ax.text(layer, -max(sizes) / 2 - .1, name, ha='center', fontsize=7)
    ax.set_axis_off(); ax.margins(.15)

def ticks(ax, values, axis='x'):
    "Ticks of a logarithmic axis at these values, written as plain numbers."
    getattr(ax, f'set_{axis}scale')('log')
    getattr(ax, f'set_{axis}ticks')(values, [f'{v:.3g}' for v in values])
    getattr(ax, f'{axis}axis').set_minor_locator(plt.NullLocator())
