"""Signatures of Liger functions that are called, as the named version declares them: parameters and their defaults."""

VERSION = "0.8.5"

SIGNATURES = {
    "liger_fused_linear_cross_entropy": (
        "input",
        "weight",
        "target",
        "bias=None",
        "ce_weight=None",
        "ignore_index=-100",
        "lse_square_scale=0.0",
        "label_smoothing=0.0",
        "reduction='mean'",
        "softcap=None",
        "return_z_loss=False",
        "accum_dtype=None",
        "use_token_scaling=False",
        "return_token_accuracy=False",
        "return_predicted_tokens=False",
        "chunk_mem_const=1",
    )
}
