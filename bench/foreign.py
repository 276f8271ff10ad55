"""Trace and prune networks of other libraries: `python bench/foreign.py [--only PART] [--list]` resumes results/foreign.csv.

Small configurations with random weights; nothing is downloaded. Needs the extra `foreign`. Of each network: its graph, PHEW at densities
.1 and .01 (weights kept, and how many of them lie on no complete path), SynFlow with pixels and without, SNIP on two examples, the trace of
the path kernel both ways, the seconds of processor time that tracing takes, and whether the network is as it was. A column holds the numbers, or the words of the refusal.
"""
import argparse, csv, hashlib, os, sys, time, warnings
from pathlib import Path

root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
columns = '''model library refused seconds layers weights units outputs no_ends left_out phew_0.1 phew_0.01 synflow_pixels synflow_paths
             snip trace_pixels trace_paths as_before'''.split()

def ids(n=8, top=50):
    import torch
    return (torch.arange(n)*7 % top)[None]

def noise(*size):
    import torch
    return torch.randn(1, *size, generator=torch.Generator().manual_seed(0))

small = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=64,
             num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, attention_probs_dropout_prob=0., hidden_dropout_prob=0.)
seq2seq = dict(vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
               encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
               decoder_start_token_id=1)
vision = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8, num_labels=5)
# config -> (its arguments, the model, its inputs)
texts = {
    'Bert': ('BertForSequenceClassification', {}), 'Roberta': ('RobertaForSequenceClassification', {}),
    'Albert': ('AlbertForSequenceClassification', dict(embedding_size=16)), 'Electra': ('ElectraForSequenceClassification', dict(embedding_size=16)),
    'MobileBert': ('MobileBertForSequenceClassification', dict(embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32)),
    'DistilBert': ('DistilBertForSequenceClassification', dict(dim=32, n_layers=2, n_heads=4, hidden_dim=48)),
    'DebertaV2': ('DebertaV2ForSequenceClassification', dict(relative_attention=True, pos_att_type=['p2c', 'c2p'], type_vocab_size=0)),
    'Deberta': ('DebertaForSequenceClassification', dict(relative_attention=True, pos_att_type=['p2c', 'c2p'], type_vocab_size=0)),
    'ConvBert': ('ConvBertForSequenceClassification', dict(embedding_size=32)), 'SqueezeBert': ('SqueezeBertForSequenceClassification', dict(embedding_size=32)),
    'FNet': ('FNetForSequenceClassification', {}), 'MPNet': ('MPNetForSequenceClassification', {}), 'RoFormer': ('RoFormerForSequenceClassification', {}),
    'XLNet': ('XLNetForSequenceClassification', dict(d_model=32, n_layer=2, n_head=4, d_inner=48, max_position_embeddings=None)), 'MegatronBert': ('MegatronBertForSequenceClassification', {}),
    'CamembertConfig': ('CamembertForSequenceClassification', {}), 'ErnieConfig': ('ErnieForSequenceClassification', {}),
    'ModernBert': ('ModernBertForSequenceClassification', {}), 'Funnel': ('FunnelForSequenceClassification', dict(num_hidden_layers=None, d_model=32, block_sizes=[1, 1], n_head=4, d_head=8, d_inner=48)),
    'GPT2': ('GPT2LMHeadModel', dict(n_embd=32, n_layer=2, n_head=4, n_positions=64)), 'GPTNeo': ('GPTNeoForCausalLM', dict(num_layers=2, num_heads=4, attention_types=[[['global', 'local'], 1]])),
    'GPTNeoX': ('GPTNeoXForCausalLM', {}), 'GPTJ': ('GPTJForCausalLM', dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4)), 'OPT': ('OPTForCausalLM', dict(ffn_dim=48, word_embed_proj_dim=32)),
    'Bloom': ('BloomForCausalLM', dict(n_layer=2, n_head=4)), 'Llama': ('LlamaForCausalLM', {}), 'Mistral': ('MistralForCausalLM', dict(sliding_window=None)),
    'Qwen2': ('Qwen2ForCausalLM', {}), 'Qwen3': ('Qwen3ForCausalLM', dict(head_dim=8)), 'Gemma': ('GemmaForCausalLM', dict(head_dim=8)), 'Gemma2': ('Gemma2ForCausalLM', dict(head_dim=8)),
    'Phi': ('PhiForCausalLM', {}), 'Phi3': ('Phi3ForCausalLM', {}), 'Falcon': ('FalconForCausalLM', {}), 'StableLm': ('StableLmForCausalLM', {}), 'Olmo': ('OlmoForCausalLM', {}),
    'Cohere': ('CohereForCausalLM', {}), 'Starcoder2': ('Starcoder2ForCausalLM', {}), 'Mixtral': ('MixtralForCausalLM', dict(num_local_experts=4, num_experts_per_tok=2)),
    'Qwen2Moe': ('Qwen2MoeForCausalLM', dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)),
    'Olmoe': ('OlmoeForCausalLM', dict(num_experts=4, num_experts_per_tok=2)), 'Mamba': ('MambaForCausalLM', dict(state_size=4, num_hidden_layers=2)),
    'Rwkv': ('RwkvForCausalLM', dict(attention_hidden_size=32)), 'XGLM': ('XGLMForCausalLM', dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48)),
    'BioGpt': ('BioGptForCausalLM', {}), 'CTRL': ('CTRLLMHeadModel', dict(n_embd=32, n_layer=2, n_head=4, dff=48)), 'OpenAIGPT': ('OpenAIGPTLMHeadModel', dict(n_embd=32, n_layer=2, n_head=4)),
}
images = {
    'ViT': 'ViTForImageClassification', 'DeiT': 'DeiTForImageClassification', 'Beit': 'BeitForImageClassification', 'Dinov2': 'Dinov2ForImageClassification',
    'ViTMSN': 'ViTMSNForImageClassification', 'SiglipVision': 'SiglipVisionModel', 'CLIPVision': 'CLIPVisionModel', 'IJepa': 'IJepaForImageClassification',
    'Data2VecVision': 'Data2VecVisionForImageClassification', 'ResNet': 'ResNetForImageClassification', 'RegNet': 'RegNetForImageClassification',
    'ConvNext': 'ConvNextForImageClassification', 'ConvNextV2': 'ConvNextV2ForImageClassification', 'MobileNetV1': 'MobileNetV1ForImageClassification',
    'MobileNetV2': 'MobileNetV2ForImageClassification', 'PoolFormer': 'PoolFormerForImageClassification', 'Swin': 'SwinForImageClassification',
    'Segformer': 'SegformerForSemanticSegmentation', 'Bit': 'BitForImageClassification',
}
sizes = dict(ResNet=dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]), RegNet=dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
             ConvNext=dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2), ConvNextV2=dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
             MobileNetV1=dict(depth_multiplier=.25), MobileNetV2=dict(depth_multiplier=.25), PoolFormer=dict(hidden_sizes=[8, 16, 16, 32], depths=[1]*4),
             Swin=dict(embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2, patch_size=4), Segformer=dict(hidden_sizes=[8, 8, 16, 16], depths=[1]*4, num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16),
             Bit=dict(hidden_sizes=[8, 16, 16, 32], depths=[1]*4, embedding_size=8, num_groups=4))

def hugging_face():
    "Language models, vision models, and what reads one to write the other."
    import transformers as hf
    def make(config, kind, more):
        base = {k: v for k, v in (small | more).items() if v is not None or k == 'sliding_window'}
        return getattr(hf, kind)(getattr(hf, config.removesuffix('Config') + 'Config')(**base))
    for config, (kind, more) in texts.items():
        yield f'hf {config.removesuffix("Config")}', (lambda c=config, k=kind, m=more: make(c, k, m)), (lambda: (ids(),))
    for config, kind in images.items():
        more = sizes.get(config) or vision
        extra = {} if config in sizes else dict(image_size=32)
        def build(c=config, k=kind, m=more, e=extra):
            name = c + 'Config' if hasattr(hf, c + 'Config') else c.removesuffix('Vision') + 'VisionConfig'
            return getattr(hf, k)(getattr(hf, name)(**m, **{a: b for a, b in e.items() if a not in m}))
        yield f'hf {config}', build, (lambda: (noise(3, 64 if config in sizes else 32, 64 if config in sizes else 32),))
    both = lambda: dict(input_ids=ids(), decoder_input_ids=ids(4))
    yield 'hf T5', (lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0))), both
    for name in 'Bart', 'Pegasus', 'Marian', 'MBart':
        kind = getattr(hf, name + ('MTModel' if name == 'Marian' else 'ForConditionalGeneration'))
        yield f'hf {name}', (lambda kind=kind, name=name: kind(getattr(hf, name + 'Config')(**seq2seq))), both
    whisper = seq2seq | dict(num_mel_bins=8, max_source_positions=16, max_target_positions=16)
    yield 'hf Whisper', (lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**whisper))), (lambda: dict(input_features=noise(8, 32), decoder_input_ids=ids(4)))
    conv = dict(conv_dim=(8, 8), conv_kernel=(4, 3), conv_stride=(4, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    for name in 'Wav2Vec2', 'Hubert', 'WavLM':
        yield f'hf {name}', (lambda n=name: getattr(hf, n + 'ForSequenceClassification')(getattr(hf, n + 'Config')(**(small | conv)))), (lambda: (noise(400),))
    clip = dict(text_config=small | dict(projection_dim=16), vision_config=vision | dict(projection_dim=16), projection_dim=16)
    yield 'hf CLIP', (lambda: hf.CLIPModel(hf.CLIPConfig(**clip))), (lambda: dict(input_ids=ids(), pixel_values=noise(3, 32, 32)))

timm_names = '''resnet18 resnetv2_50 res2net50_14w_8s seresnet18 skresnet18 ecaresnet26t resnest14d regnety_002 densenet121 dla34 vgg11
    mobilenetv3_small_050 mobilenetv4_conv_small efficientnet_b0 tf_efficientnetv2_b0 ghostnet_050 mnasnet_small hardcorenas_a fbnetc_100
    convnext_atto convnextv2_atto inception_next_tiny repvgg_a0 mobileone_s0 fastvit_t8 edgenext_xx_small mixnet_s tinynet_e semnasnet_050
    lcnet_035 hgnetv2_b0 cspresnet50 darknet53 selecsls42 vovnet39a xception41 nf_regnet_b0 dm_nfnet_f0 gernet_s rexnet_100 starnet_s1
    vit_tiny_patch16_224 deit_tiny_patch16_224 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 poolformer_s12 pvt_v2_b0 swin_tiny_patch4_window7_224
    xcit_nano_12_p16_224 crossvit_tiny_240 levit_128s mobilevit_xxs mobilevitv2_050 coat_lite_tiny convit_tiny cait_xxs24_224 efficientformerv2_s0
    tiny_vit_5m_224 volo_d1_224 visformer_tiny maxvit_rmlp_pico_rw_256 coatnet_pico_rw_224 focalnet_tiny_srf davit_tiny hiera_tiny_224'''.split()

def pytorch_image_models():
    import timm
    for name in timm_names:
        size = timm.models.get_pretrained_cfg(name).input_size[1] if timm.models.is_model(name) else 224
        less = 64 if not any(k in name for k in ('224', '240', '256', 'levit', 'mobilevit', 'coat', 'convit', 'volo', 'efficientformer', 'visformer')) else size
        yield f'timm {name}', (lambda n=name: timm.create_model(n, num_classes=10)), (lambda s=less: (noise(3, s, s),))

def diffusion():
    import diffusers as d, torch
    blocks = dict(block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, sample_size=16)
    step = lambda: torch.tensor([3])
    yield 'diffusers UNet2D', (lambda: d.UNet2DModel(**blocks, down_block_types=('DownBlock2D', 'AttnDownBlock2D'), up_block_types=('AttnUpBlock2D', 'UpBlock2D'), attention_head_dim=4)), (lambda: (noise(3, 16, 16), step()))
    yield 'diffusers UNet2DCondition', (lambda: d.UNet2DConditionModel(**blocks, cross_attention_dim=8, attention_head_dim=4, down_block_types=('CrossAttnDownBlock2D', 'DownBlock2D'), up_block_types=('UpBlock2D', 'CrossAttnUpBlock2D'))), (lambda: (noise(4, 16, 16), step(), noise(5, 8)))
    yield 'diffusers AutoencoderKL', (lambda: d.AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, down_block_types=('DownEncoderBlock2D',)*2, up_block_types=('UpDecoderBlock2D',)*2)), (lambda: (noise(3, 16, 16),))
    yield 'diffusers VQModel', (lambda: d.VQModel(block_out_channels=(8,), norm_num_groups=4)), (lambda: (noise(3, 16, 16),))
    yield 'diffusers DiT', (lambda: d.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4)), (lambda: (noise(4, 8, 8), step(), torch.tensor([1])))

def segmentation():
    import segmentation_models_pytorch as smp
    for name in 'Unet UnetPlusPlus MAnet Linknet FPN PSPNet DeepLabV3 DeepLabV3Plus PAN UPerNet Segformer'.split():
        if hasattr(smp, name): yield f'smp {name}', (lambda n=name: getattr(smp, n)('resnet18', encoder_weights=None, classes=2)), (lambda s=128 if name == 'PAN' else 64: (noise(3, s, s),))

def graphs():
    import torch, torch_geometric.nn as g
    edges = lambda: torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 1]])
    for name in 'GCNConv SAGEConv GATConv GATv2Conv GraphConv TAGConv SGConv ChebConv TransformerConv LEConv ClusterGCNConv ARMAConv FeaStConv MFConv'.split():
        more = dict(K=2) if name in ('ChebConv', 'TAGConv') else {}
        class Net(torch.nn.Module):
            def __init__(self, kind, more):
                super().__init__()
                self.a, self.b = kind(4, 8, **more), kind(8, 3, **more)
            def forward(self, x, edges): return self.b(self.a(x, edges).relu(), edges)
        yield f'pyg {name}', (lambda k=getattr(g, name), m=more, N=Net: N(k, m)), (lambda: (noise(4, 4)[0], edges()))
    perceptron = lambda n, m: torch.nn.Sequential(torch.nn.Linear(n, 8), torch.nn.ReLU(), torch.nn.Linear(8, m))
    built = dict(GINConv=lambda n, m: g.GINConv(perceptron(n, m)), EdgeConv=lambda n, m: g.EdgeConv(perceptron(2*n, m)), GENConv=g.GENConv,
                 ResGatedGraphConv=g.ResGatedGraphConv, SuperGATConv=g.SuperGATConv, HypergraphConv=g.HypergraphConv, FiLMConv=g.FiLMConv, SSGConv=lambda n, m: g.SSGConv(n, m, alpha=.1), EGConv=lambda n, m: g.EGConv(n, m, num_heads=1),
                 CGConv=lambda n, m: g.CGConv(n), GatedGraphConv=lambda n, m: g.GatedGraphConv(n, 2))
    for name, make in built.items():
        if name in ('CGConv', 'GatedGraphConv'): # as wide as its input
            yield f'pyg {name}', (lambda f=make, N=Net: N(lambda n, m: f(4, 4), {})), (lambda: (noise(4, 4)[0], edges()))
        else: yield f'pyg {name}', (lambda f=make, N=Net: N(f, {})), (lambda: (noise(4, 4)[0], edges()))
    for name in 'GCN GraphSAGE GIN GAT PNA'.split():
        more = dict(aggregators=['mean', 'max'], scalers=['identity'], deg=torch.tensor([0, 2, 2])) if name == 'PNA' else {}
        yield f'pyg {name}', (lambda k=getattr(g.models, name), m=more: k(4, 8, 2, 3, **m)), (lambda: (noise(4, 4)[0], edges()))

def vision_library():
    import torchvision as tv
    for name in 'lraspp_mobilenet_v3_large deeplabv3_mobilenet_v3_large fcn_resnet50'.split():
        yield f'torchvision {name}', (lambda n=name: tv.models.get_model(n, weights=None, weights_backbone=None, num_classes=3)), (lambda: (noise(3, 64, 64),))
    heads = dict(weights=None, weights_backbone=None, num_classes=3)
    for name in 'ssdlite320_mobilenet_v3_large retinanet_resnet50_fpn fasterrcnn_mobilenet_v3_large_320_fpn'.split():
        small = {} if name.startswith('ssdlite') else dict(min_size=64, max_size=64)
        yield f'torchvision {name}', (lambda n=name, m=small: tv.models.get_model(n, **heads, **m)), (lambda: ([noise(3, 64, 64)[0]],))
    for name in 'mobilenet_v2 shufflenet_v2_x0_5 squeezenet1_1 mnasnet0_5'.split():
        yield f'torchvision {name}', (lambda n=name: tv.models.get_model(n, weights=None, num_classes=3)), (lambda: (noise(3, 64, 64),))
    for name in 'r3d_18 mc3_18 r2plus1d_18'.split():
        yield f'torchvision {name}', (lambda n=name: tv.models.get_model(n, weights=None, num_classes=3)), (lambda: (noise(3, 4, 32, 32),))

parts = dict(hf=hugging_face, timm=pytorch_image_models, diffusers=diffusion, smp=segmentation, pyg=graphs, torchvision=vision_library)

def networks(only=None):
    "Name, maker of the network, maker of its inputs."
    for part, f in parts.items():
        if only is not None and part != only: continue
        try: yield from f()
        except ImportError as e: print(f'{part}: {e}', file=sys.stderr)

def fingerprint(model):
    "All that a network is, as text."
    import torch
    parts = [hashlib.sha1(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest() for t in (*model.parameters(), *model.buffers())]
    def plain(x): return f'tensor{tuple(x.shape)}{x.dtype}' if isinstance(x, torch.Tensor) else [*map(plain, x)] if isinstance(x, (list, tuple)) else len(x) if isinstance(x, dict) else str(type(x))
    return str((parts, [(k, plain(v)) for m in model.modules() for k, v in vars(m).items()], [p.requires_grad for p in model.parameters()]))

def first_tensor(out):
    from phew_nb.graph import named_tensors
    return next(t for _, t in named_tensors(out) if t.is_floating_point())

def attempt(f):
    "What `f` gives, or the words of its refusal."
    try: return f()
    except Exception as e: return f'{type(e).__name__}: {e}'.replace('\n', ' ')[:300]

def two(example):
    "A batch of two, for the statistics of batch normalisation: an example, and the same the other way round; of graphs the one there is."
    import torch
    from torch.utils._pytree import tree_map
    back = lambda t: t.flip(-1) if t.is_floating_point() else t
    return tree_map(lambda t: torch.cat([t, back(t)]) if isinstance(t, torch.Tensor) and t.ndim and len(t) == 1 else t, example)

def measure(name, make, inputs):
    "The row of one network."
    import torch
    from phew_nb.graph import trace
    from phew_nb.metrics import path_trace
    from phew_nb.scores import snip
    from phew_nb.synflow import synflow
    from phew_nb.walks import phew
    torch.manual_seed(0)
    row = dict(model=name, library=name.split()[0])
    try: model, example = make().eval(), inputs()
    except Exception as e: return row | dict(refused=f'not built: {type(e).__name__}: {e}'.replace('\n', ' ')[:300])
    before, start = fingerprint(model), time.process_time()
    graph = attempt(lambda: trace(model, example=example))
    if isinstance(graph, str): return row | dict(refused=graph, as_before=fingerprint(model) == before)
    row |= dict(seconds=round(time.process_time() - start, 2), layers=len(graph.layers), weights=graph.total, units=graph.n_units,
                outputs=len(graph.outputs), no_ends=len(graph.no_ends), left_out=len(graph.left_out))
    def kept(f):
        masks = f()
        return f"{masks.kept} ({sum(masks.report(graph).lost.values())} lost)"
    for d in .1, .01: row[f'phew_{d}'] = attempt(lambda: kept(lambda: phew(model, d, graph, seed=0)))
    for key, spatial in ('synflow_pixels', True), ('synflow_paths', False):
        row[key] = attempt(lambda: kept(lambda: synflow(model, .1, graph, iterations=3, spatial=spatial)))
        row[key.replace('synflow', 'trace')] = attempt(lambda: f'{path_trace(model, None, graph, spatial=spatial).log10:.3f}')
    dl = [(pair, torch.zeros(2)) if isinstance(pair := two(example), dict) else (*pair, torch.zeros(2))]
    row['snip'] = attempt(lambda: kept(lambda: snip(model, .1, graph, dl=dl, loss=lambda out, y: first_tensor(out).square().mean())))
    return row | dict(as_before=fingerprint(model) == before)

def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', choices=list(parts))
    parser.add_argument('--list', action='store_true')
    parser.add_argument('--out', default=str(root/'results'/'foreign.csv'))
    parser.add_argument('--names', nargs='*')
    args = parser.parse_args()
    if args.list: return print(*(name for name, *_ in networks(args.only)), sep='\n')
    done = set()
    if os.path.exists(args.out):
        with open(args.out, newline='') as f: done = {row['model'] for row in csv.DictReader(f)}
    for name, make, inputs in networks(args.only):
        if name in done or args.names and name not in args.names: continue
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            row = measure(name, make, inputs)
        new = not os.path.exists(args.out)
        with open(args.out, 'a', newline='') as f:
            writer = csv.DictWriter(f, columns)
            if new: writer.writeheader()
            writer.writerow(row)
        print(row, flush=True)

if __name__ == '__main__': main()
