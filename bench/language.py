"""Memory and time of PHEW on a language model: `python bench/language.py [--layers 16] [--width 2048] [--density .01] [--dense]`.

A Llama of the library `transformers`, in bfloat16, with random weights; the embedding and the head stay dense only with `--dense`. Memory is what the
process grows by at its peak over what it held when the model was made, returned masks included, in bytes a weight."""
import argparse, json, time

import torch

from measure import peak

def resident():
    "Bytes that the process holds now."
    with open('/proc/self/status') as f: return next(int(line.split()[1]) for line in f if line.startswith('VmRSS'))*1024

def make(layers, width):
    "A Llama in bfloat16."
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(hidden_size=width, intermediate_size=width*43//16, num_hidden_layers=layers, num_attention_heads=width//64,
                         num_key_value_heads=width//64, vocab_size=32_000, tie_word_embeddings=False, use_cache=False)
    with torch.device('meta'): model = LlamaForCausalLM(config)
    model, gen = model.to(torch.bfloat16).to_empty(device='cpu'), torch.Generator().manual_seed(0)
    for name, p in model.named_parameters(): p.data.normal_(0, .02, generator=gen) if p.ndim > 1 else p.data.fill_(1.)
    for module in model.modules(): # its table of angles is no parameter
        if hasattr(module, 'inv_freq'): module.inv_freq = 1/10_000**(torch.arange(0, 64, 2).float()/64)
    return model.eval()

def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(layers=16, width=2048, density=.01, seed=0).items(): ask.add_argument(f'--{name}', type=type(value), default=value)
    ask.add_argument('--dense', action='store_true')
    args = ask.parse_args()
    from phew_nb.graph import trace
    from phew_nb.walks import phew
    model = make(args.layers, args.width)
    before, start = resident(), time.time()
    patterns = ('*embed_tokens*', '*lm_head*') if args.dense else ()
    graph = trace(model, example=torch.arange(4)[None], keep_dense=patterns)
    traced, peak_traced = time.time() - start, peak()
    masks = phew(graph, args.density, seed=args.seed, progress=False)
    print(json.dumps(dict(weights=graph.total, kept=masks.kept, trace_s=round(traced, 1), all_s=round(time.time() - start, 1),
                          cpu_s=round(time.process_time(), 1), threads=torch.get_num_threads(), tracing_bytes_a_weight=round((peak_traced - before)/graph.total, 2),
                          bytes_a_weight=round((peak() - before)/graph.total, 2), hash=masks.hash()[:16])))

if __name__ == '__main__': main()
