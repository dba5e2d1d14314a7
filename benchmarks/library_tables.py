"""Small models of libraries, and inputs to match, as tables by the library: what `benchmarks.library_models` builds."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

BATCH = 4

Draw = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Made:
    """A class or a function of a library, by its dotted name, and what it is called with; among that may be others."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        module, _, name = self.name.rpartition(".")
        called = getattr(importlib.import_module(module), name)
        return called(*map(_made, self.positional), **{name: _made(value) for name, value in self.options.items()})


def _made(value: Any) -> Any:
    return value() if isinstance(value, Made) else value


def made(name: str, *positional: Any, **options: Any) -> Made:
    """A model, or a part of one."""
    return Made(name, options, positional)


def floats(*shape: int) -> Draw:
    """Normal numbers."""
    return lambda: torch.randn(shape)


def ints(high: int, *shape: int) -> Draw:
    """Whole numbers below one."""
    return lambda: torch.randint(high, shape)


def ones(*shape: int, dtype: torch.dtype = torch.bool) -> Draw:
    """A mask that hides nothing, or so many of another dtype."""
    return lambda: torch.ones(shape, dtype=dtype)


Row = tuple[Made, Mapping[str, Draw]]
PICTURES, WORDS = floats(BATCH, 3, 32, 32), ints(256, BATCH, 16)
LATENT, STEPS, TEXT = floats(BATCH, 4, 8, 8), ints(100, BATCH), floats(BATCH, 7, 32)
VOLUME = {"x": floats(2, 1, 32, 32, 32)}
WIDE = {"sample": floats(BATCH, 4, 16, 16), "timestep": STEPS, "encoder_hidden_states": TEXT}
UNET = {"sample_size": 16, "block_out_channels": (16, 32), "norm_num_groups": 8, "attention_head_dim": 8}
CROSS = UNET | {"cross_attention_dim": 32, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
KL = {"block_out_channels": (16, 32), "norm_num_groups": 8}
CODED = KL | {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2}
MM = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "attention_head_dim": 8, "num_attention_heads": 4}
WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 256}
CASCADE = {"conditioning_dim": 32, "block_out_channels": (32, 32), "num_attention_heads": (4, 4), "clip_text_in_channels": 32}
REPEATS = {"down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1), "timestep_ratio_embedding_dim": 32}
MAPPERS = {"down_blocks_repeat_mappers": (1, 1), "up_blocks_repeat_mappers": (1, 1)}
BLOCKS = (
    ("SDCascadeResBlock", "SDCascadeTimestepBlock"),
    ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock"),
)
CLIPS = {"clip_text_pooled_in_channels": 32, "clip_image_in_channels": 32}

DIFFUSERS: dict[str, Row] = {
    "UNet2DModel": (
        made("diffusers.UNet2DModel", **UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
             up_block_types=("AttnUpBlock2D", "UpBlock2D")),
        {"sample": floats(BATCH, 3, 16, 16), "timestep": STEPS},
    ),
    "UNet2DConditionModel": (
        made("diffusers.UNet2DConditionModel", **CROSS, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")), WIDE,
    ),
    "UNet3DConditionModel": (
        made("diffusers.UNet3DConditionModel", **UNET, cross_attention_dim=32,
             down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D")),
        {"sample": floats(2, 4, 4, 16, 16), "timestep": ints(100, 2), "encoder_hidden_states": floats(2, 7, 32)},
    ),
    "ControlNetModel": (
        made("diffusers.ControlNetModel", block_out_channels=(16, 32), norm_num_groups=8, attention_head_dim=8,
             cross_attention_dim=32, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D")),
        WIDE | {"controlnet_cond": floats(BATCH, 3, 128, 128)},
    ),
    "AutoencoderKL": (made("diffusers.AutoencoderKL", **CODED), {"sample": floats(BATCH, 3, 16, 16)}),
    "VQModel": (made("diffusers.VQModel", **CODED, latent_channels=3), {"sample": floats(BATCH, 3, 16, 16)}),
    "DiTTransformer2DModel": (
        made("diffusers.DiTTransformer2DModel", **DIT, out_channels=8, sample_size=8, num_embeds_ada_norm=10),
        {"hidden_states": LATENT, "timestep": STEPS, "class_labels": ints(10, BATCH)},
    ),
    "SD3Transformer2DModel": (
        made("diffusers.SD3Transformer2DModel", **MM, num_layers=2, caption_projection_dim=32, joint_attention_dim=32,
             pooled_projection_dim=64),
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "pooled_projections": floats(BATCH, 64), "timestep": STEPS},
    ),
    "FluxTransformer2DModel": (
        made("diffusers.FluxTransformer2DModel", patch_size=1, in_channels=4, num_layers=1, num_single_layers=1,
             attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
             axes_dims_rope=[4, 4, 8]),
        {"hidden_states": floats(BATCH, 16, 4), "encoder_hidden_states": TEXT, "pooled_projections": floats(BATCH, 32),
         "timestep": floats(BATCH), "img_ids": floats(16, 3), "txt_ids": floats(7, 3)},
    ),
    "SanaTransformer2DModel": (
        made("diffusers.SanaTransformer2DModel", patch_size=1, in_channels=4, out_channels=4, num_layers=1,
             attention_head_dim=4, num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=4,
             cross_attention_dim=8, caption_channels=8, sample_size=8),
        {"hidden_states": LATENT, "encoder_hidden_states": floats(BATCH, 7, 8), "timestep": STEPS},
    ),
    "WanTransformer3DModel": (
        made("diffusers.WanTransformer3DModel", **WAN, patch_size=(1, 2, 2), ffn_dim=32, num_layers=2, cross_attn_norm=True,
             qk_norm="rms_norm_across_heads", rope_max_seq_len=32),
        {"hidden_states": floats(BATCH, 4, 2, 8, 8), "timestep": STEPS, "encoder_hidden_states": floats(BATCH, 7, 16)},
    ),
    "CogVideoXTransformer3DModel": (
        made("diffusers.CogVideoXTransformer3DModel", **DIT, out_channels=4, time_embed_dim=2, text_embed_dim=8,
             sample_width=8, sample_height=8, sample_frames=8, patch_size=2, max_text_seq_length=8),
        {"hidden_states": floats(BATCH, 1, 4, 8, 8), "encoder_hidden_states": floats(BATCH, 8, 8), "timestep": STEPS},
    ),
    "AuraFlowTransformer2DModel": (
        made("diffusers.AuraFlowTransformer2DModel", **MM, num_mmdit_layers=1, num_single_dit_layers=1,
             caption_projection_dim=32, joint_attention_dim=32, pos_embed_max_size=64),
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": floats(BATCH)},
    ),
    "Lumina2Transformer2DModel": (
        made("diffusers.Lumina2Transformer2DModel", sample_size=8, patch_size=2, in_channels=4, hidden_size=24, num_layers=2,
             num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2),
             axes_lens=(128, 128, 128), cap_feat_dim=32),
        {"hidden_states": LATENT, "encoder_hidden_states": TEXT, "timestep": floats(BATCH),
         "encoder_attention_mask": ones(BATCH, 7)},
    ),
    "PriorTransformer": (
        made("diffusers.PriorTransformer", num_attention_heads=2, attention_head_dim=4, num_layers=2, embedding_dim=8,
             num_embeddings=7, additional_embeddings=4),
        {"hidden_states": floats(BATCH, 8), "timestep": STEPS, "proj_embedding": floats(BATCH, 8),
         "encoder_hidden_states": floats(BATCH, 7, 8)},
    ),
    "UVit2DModel": (
        made("diffusers.UVit2DModel", hidden_size=32, block_out_channels=32, in_channels=32, cond_embed_dim=32,
             micro_cond_encode_dim=8, micro_cond_embed_dim=40, encoder_hidden_size=32, vocab_size=256, codebook_size=256,
             num_hidden_layers=2, num_attention_heads=2, block_num_heads=2, intermediate_size=64),
        {"input_ids": ints(256, BATCH, 8, 8), "encoder_hidden_states": TEXT, "pooled_text_emb": floats(BATCH, 32),
         "micro_conds": floats(BATCH, 5)},
    ),
    "StableCascadeUNet": (
        made("diffusers.StableCascadeUNet", **CASCADE, **REPEATS, **MAPPERS, **CLIPS, in_channels=4, out_channels=4,
             block_types_per_layer=BLOCKS),
        {"sample": LATENT, "timestep_ratio": floats(BATCH), "clip_text_pooled": floats(BATCH, 1, 32), "clip_text": TEXT,
         "clip_img": floats(BATCH, 1, 32)},
    ),
}  # fmt: skip


def _decoder(**options: Any) -> Row:
    layers = made("x_transformers.Decoder", dim=32, depth=2, **{"heads": 2, "attn_dim_head": 32} | options)
    model = made("x_transformers.TransformerWrapper", num_tokens=256, max_seq_len=64, attn_layers=layers)
    return made("x_transformers.AutoregressiveWrapper", model), {"x": ints(256, BATCH, 17)}


def _encoder() -> Made:
    return made("x_transformers.Encoder", dim=32, depth=2, heads=4)


BOTH_STACKS = {"dim": 32} | {
    f"{side}_{name}": value
    for side in ("enc", "dec")
    for name, value in {"num_tokens": 256, "depth": 2, "heads": 4, "max_seq_len": 32}.items()
}
X_TRANSFORMERS: dict[str, Row] = {
    "plain": _decoder(),
    "rotary": _decoder(rotary_pos_emb=True),
    "ALiBi": _decoder(alibi_pos_bias=True, alibi_num_heads=1),
    "flash": _decoder(attn_flash=True),
    "GLU": _decoder(ff_glu=True, ff_swish=True, ff_no_bias=True),
    "RMS norm": _decoder(use_rmsnorm=True),
    "T5 bias": _decoder(rel_pos_bias=True),
    "talking heads": _decoder(attn_pre_talking_heads=True, attn_post_talking_heads=True),
    "grouped queries": _decoder(attn_kv_heads=1),
    "normed queries": _decoder(attn_qk_norm=True),
    "memories": _decoder(attn_num_mem_kv=4),
    "Macaron": _decoder(macaron=True),
    "sandwich": _decoder(sandwich_norm=True),
    "gated residual": _decoder(gate_residual=True),
    "shifted": _decoder(shift_tokens=1),
    "sparse": _decoder(attn_sparse_topk=4),
    "dynamic bias": _decoder(dynamic_pos_bias=True),
    "residual attention": _decoder(residual_attn=True),
    "hyper-connections": _decoder(num_residual_streams=2),
    "LASER": _decoder(attn_laser=True),
    "dropout": _decoder(attn_dropout=0.1, ff_dropout=0.1),
    "layer dropout": _decoder(layer_dropout=0.1),
    "XTransformer": (
        made("x_transformers.XTransformer", **BOTH_STACKS), {"src": WORDS, "tgt": ints(256, BATCH, 17)},
    ),
    "ViT": (
        made("x_transformers.ViTransformerWrapper", image_size=32, patch_size=8, num_classes=10, attn_layers=_encoder()),
        {"img": PICTURES},
    ),
    "continuous": (
        made("x_transformers.ContinuousTransformerWrapper", dim_in=8, dim_out=8, max_seq_len=32, attn_layers=_encoder()),
        {"x": floats(BATCH, 16, 8)},
    ),
}  # fmt: skip

VIT = {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
CLIP3D = {"image_size": 16, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 10, "dim": 32, "heads": 4}


def _vit(name: str, *, images: int = 32, argument: str = "img", **options: Any) -> Row:
    return made(f"vit_pytorch.{name}", **options), {argument: floats(BATCH, 3, images, images)}


FOUR = {"depth": (1, 1, 1, 1), "num_classes": 10}
CCT = {"img_size": 32, "embedding_dim": 32, "n_conv_layers": 1, "kernel_size": 3, "stride": 2, "padding": 1, "num_heads": 4}
VIT_PYTORCH: dict[str, Row] = {
    "ViT": _vit("ViT", **VIT, dropout=0.1, emb_dropout=0.1),
    "SimpleViT": _vit("SimpleViT", **VIT),
    "DeepViT": _vit("deepvit.DeepViT", **VIT),
    "CaiT": _vit("cait.CaiT", **VIT, cls_depth=1, layer_dropout=0.05),
    "parallel": _vit("parallel_vit.ViT", **VIT),
    "small dataset": _vit("vit_for_small_dataset.ViT", **VIT),
    "register tokens": _vit("simple_vit_with_register_tokens.SimpleViT", **VIT),
    "normed queries": _vit("simple_vit_with_qk_norm.SimpleViT", **VIT),
    "patch dropout": _vit("vit_with_patch_dropout.ViT", **VIT),
    "RvT": _vit("rvt.RvT", **VIT),
    "adaptive tokens": _vit("ats_vit.ViT", **VIT, max_tokens_per_depth=(8, 4)),
    "XCiT": _vit("xcit.XCiT", **VIT, cls_depth=1),
    "CCT": _vit("cct.CCT", **CCT, num_layers=2, mlp_ratio=2.0, num_classes=10, argument="x"),
    "T2T": _vit("t2t.T2TViT", **{k: v for k, v in VIT.items() if k != "patch_size"}, t2t_layers=((7, 4), (3, 2))),
    "PiT": _vit("pit.PiT", **VIT | {"depth": (1, 1)}),
    "LeViT": _vit("levit.LeViT", images=64, image_size=64, num_classes=10, stages=2, dim=(32, 48), depth=1, heads=(2, 3),
                  mlp_mult=2),
    "CvT": _vit("cvt.CvT", num_classes=10, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=16, s1_heads=1, s2_heads=1, s3_heads=1,
                s3_depth=1, argument="x"),
    "RegionViT": _vit("regionvit.RegionViT", images=64, dim=(8, 8, 8, 8), window_size=2, **FOUR, argument="x"),
    "ScalableViT": _vit("scalable_vit.ScalableViT", images=64, dim=16, heads=(1, 1, 1, 1), ssa_dim_key=8,
                        reduction_factor=(4, 2, 2, 1), window_size=(8, 4, None, None), **FOUR),
    "NesT": _vit("nest.NesT", image_size=32, patch_size=4, dim=16, heads=2, num_hierarchies=2, block_repeats=(1, 1),
                 num_classes=10),
    "MobileViT": _vit("mobile_vit.MobileViT", images=64, image_size=(64, 64), dims=[16] * 3, channels=[8] * 11, num_classes=10,
                      argument="x"),
    "MaxViT": _vit("max_vit.MaxViT", images=56, num_classes=10, dim_conv_stem=8, dim=16, dim_head=8, depth=(1, 1),
                   window_size=7, mbconv_expansion_rate=2, mbconv_shrinkage_rate=0.25, dropout=0.1, argument="x"),
    "3D": (made("vit_pytorch.vit_3d.ViT", **CLIP3D, depth=2, mlp_dim=64), {"video": floats(BATCH, 3, 4, 16, 16)}),
    "ViViT": (made("vit_pytorch.vivit.ViViT", **CLIP3D, spatial_depth=1, temporal_depth=1, mlp_dim=64),
              {"video": floats(BATCH, 3, 4, 16, 16)}),
    "extractor": (made("vit_pytorch.extractor.Extractor", made("vit_pytorch.ViT", **VIT)), {"img": PICTURES}),
}  # fmt: skip

SEGMENTED = ("Unet", "UnetPlusPlus", "MAnet", "Linknet", "FPN", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "UPerNet", "Segformer")
GRAPH = {"x": floats(64, 16), "edge_index": ints(64, 2, 256)}
NET = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
VISION = {"layers": 2, "width": 64, "patch_size": 8, "image_size": 32, "head_width": 16}
SMALL_TEXT = {"context_length": 16, "vocab_size": 256, "width": 64, "heads": 4, "layers": 2}
LM = {"num_tokens": 256, "dim": 32, "depth": 2, "heads": 4, "max_seq_len": 32}
LONG = {"x": ints(256, BATCH, 32)}
PERCEIVER = {"depth": 2, "num_latents": 8, "latent_dim": 32, "latent_heads": 2, "cross_dim_head": 8, "latent_dim_head": 8}
FILTERS = {"n_filters": 16, "bn_chan": 16, "n_repeats": 1}
OTHERS: dict[str, Row] = {
    "open_clip/CLIP": (
        made("open_clip.model.CLIP", embed_dim=32, vision_cfg=VISION, text_cfg=SMALL_TEXT), {"image": PICTURES, "text": WORDS},
    ),
    **{
        f"segmentation_models_pytorch/{name}": (
            made(f"segmentation_models_pytorch.{name}", encoder_name="resnet18", encoder_weights=None, classes=3),
            {"x": floats(BATCH, 3, 64, 64)},
        )
        for name in SEGMENTED
    },
    **{f"torch_geometric/{name}": (made(f"torch_geometric.nn.{name}", 16, 32, 2, 4), GRAPH)
       for name in ("GCN", "GAT", "GraphSAGE", "GIN", "EdgeCNN")},
    "monai/UNet": (made("monai.networks.nets.UNet", **NET, channels=(8, 16, 32), strides=(2, 2), num_res_units=2), VOLUME),
    "monai/UNETR": (made("monai.networks.nets.UNETR", in_channels=1, out_channels=2, img_size=(32, 32, 32), feature_size=8,
                         hidden_size=48, mlp_dim=96, num_heads=4), {"x_in": VOLUME["x"]}),
    "monai/SegResNet": (made("monai.networks.nets.SegResNet", **NET, init_filters=8), VOLUME),
    "monai/VNet": (made("monai.networks.nets.VNet", **NET), VOLUME),
    "monai/BasicUNet": (made("monai.networks.nets.BasicUNet", **NET, features=(8, 8, 16, 16, 16, 8)), VOLUME),
    "monai/HighResNet": (made("monai.networks.nets.HighResNet", **NET), VOLUME),
    "speechbrain/TransformerASR": (
        made("speechbrain.lobes.models.transformer.TransformerASR.TransformerASR", tgt_vocab=64, input_size=40, d_model=32,
             nhead=4, num_encoder_layers=2, num_decoder_layers=2, d_ffn=64),
        {"src": floats(BATCH, 20, 40), "tgt": ints(63, BATCH, 10)},
    ),
    "asteroid/ConvTasNet": (
        made("asteroid.models.ConvTasNet", 2, **FILTERS, hid_chan=16, skip_chan=16, n_blocks=2), {"wav": floats(BATCH, 1, 800)},
    ),
    "asteroid/DPRNNTasNet": (
        made("asteroid.models.DPRNNTasNet", 2, **FILTERS, hid_size=16, chunk_size=20), {"wav": floats(BATCH, 1, 800)},
    ),
    "perceiver_pytorch/PerceiverLM": (
        made("perceiver_pytorch.PerceiverLM", num_tokens=256, dim=32, max_seq_len=16, **PERCEIVER), {"x": WORDS},
    ),
    "linformer/LinformerLM": (
        made("linformer.LinformerLM", num_tokens=256, dim=32, seq_len=32, depth=2, heads=4, k=8), LONG,
    ),
    "linear_attention_transformer/LM": (
        made("linear_attention_transformer.LinearAttentionTransformerLM", **LM, causal=True), LONG,
    ),
    "local_attention/LocalTransformer": (
        made("local_attention.LocalTransformer", **LM, local_attn_window_size=8, causal=True, dim_head=8), LONG,
    ),
    "g_mlp_pytorch/gMLP": (made("g_mlp_pytorch.gMLP", num_tokens=256, dim=32, depth=2, seq_len=16, causal=True), {"x": WORDS}),
    "nystrom_attention/Nystromformer": (
        made("nystrom_attention.Nystromformer", dim=32, dim_head=8, heads=4, depth=2, num_landmarks=8, pinv_iterations=3),
        {"x": floats(BATCH, 16, 32)},
    ),
    "conformer/Conformer": (
        made("conformer.Conformer", dim=32, depth=2, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=7, attn_dropout=0.1),
        {"x": floats(BATCH, 16, 32)},
    ),
    "vector_quantize_pytorch/VectorQuantize": (
        made("vector_quantize_pytorch.VectorQuantize", dim=16, codebook_size=32, decay=0.8), {"x": floats(BATCH, 8, 16)},
    ),
    "egnn_pytorch/EGNN_Network": (
        made("egnn_pytorch.EGNN_Network", num_tokens=21, num_positions=32, dim=16, depth=2, num_nearest_neighbors=4),
        {"feats": ints(21, BATCH, 16), "coors": floats(BATCH, 16, 3)},
    ),
    "colt5_attention/ConditionalRoutedFeedForward": (
        made("colt5_attention.ConditionalRoutedFeedForward", 32, num_heavy_tokens=4), {"x": floats(BATCH, 16, 32)},
    ),
    "st_moe_pytorch/MoE": (made("st_moe_pytorch.MoE", dim=32, num_experts=4, gating_top_n=2), {"x": floats(BATCH, 16, 32)}),
    "pykan/KAN": (
        made("kan.KAN", width=[4, 5, 1], grid=3, k=3, seed=0, auto_save=False), {"x": floats(16, 4)},
    ),
    "mambapy/Mamba": (
        made("mambapy.mamba.Mamba", made("mambapy.mamba.MambaConfig", d_model=16, n_layers=2)), {"x": floats(BATCH, 16, 16)},
    ),
}  # fmt: skip

TABLES: dict[str, dict[str, Row]] = {
    "diffusers": DIFFUSERS, "x_transformers": X_TRANSFORMERS, "vit_pytorch": VIT_PYTORCH, "": OTHERS,
}  # fmt: skip
