"""What kind of work a kernel or an operator is, by who launched it and what it is called.

The operator that launched a kernel decides where one is known; the kernel's own name decides where
none is: in graphs that were captured or compiled. Imports no torch.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "attention",
    "products",
    "elementwise",
    "tables",
    "optimizer",
    "data",
    "collectives",
]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Operators of gem_attention that only move and turn heads.
_NO_ATTENTION = ("rotary_heads",)
_ATTENTION_OPS = re.compile(r"aten::_?(scaled_dot_product|flash_attention|efficient_attention)")
_PRODUCT_OPS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot"),
        *("_scaled_mm", "_scaled_grouped_mm", "_grouped_mm", "_addmm_activation", "mkldnn_linear"),
    )
)
# Of ours: those that multiply, with what is fused around the product.
_OWN_PRODUCTS = re.compile(r"gem_\w+::\w*_(linear|bmm)(_backward)?$")
_PRODUCT_KERNELS = re.compile(
    r"gemm|nvjet|cutlass|splitk|gemv|triton_tem_fused.*mm|^dot_kernel|reduce_1Block_kernel", re.I
)
_ATTENTION_KERNELS = re.compile(
    r"^_?(jagged_flash|generalized|pooled|block|normed)_attention|fmha|flash_fwd|flash_bwd", re.I
)
_COLLECTIVE = re.compile(r"nccl|^c10d::|^gloo:|^record_param_comms", re.I)
_TABLE_KERNELS = re.compile(r"^_?table_(lookup|update)", re.I)


@dataclass(frozen=True, slots=True)
class Origin:
    """Who launched a piece of work.

    Attributes:
        section: of the step, by the names of `gem.train.clock`; empty where none is open.
        region: module; empty outside of all.
        own: outermost operator of our packages, such as ``gem_attention::pooled_attention``; empty
            for none.
        inner: innermost operator; empty for none.
    """

    section: str = ""
    region: str = ""
    own: str = ""
    inner: str = ""


def kind_of(origin: Origin, name: str) -> Kind:
    """Say what kind of work something is.

    Args:
        origin: who launched it.
        name: of the kernel or copy, or of the operator where it ran on a CPU.

    Returns:
        its kind. Norms, activations, casts and copies are ``elementwise``, and so is all that no
        rule knows.
    """
    if _COLLECTIVE.search(name) or _COLLECTIVE.search(origin.inner):
        return "collectives"
    if origin.section == "optimizer":
        return "optimizer"
    in_tables = "tables" in (origin.section, origin.region)
    if in_tables or origin.own.startswith("gem_embeddings::") or _TABLE_KERNELS.search(name):
        return "tables"
    if _is_attention(origin, name):
        return "attention"
    # Copies that an operator makes for itself, such as a reference's plan, are its own.
    if origin.section == "data" or ("HtoD" in name and not origin.own):
        return "data"
    if origin.inner in _PRODUCT_OPS or _OWN_PRODUCTS.match(origin.own):
        return "products"
    if _PRODUCT_KERNELS.search(name):
        return "products"
    return "elementwise"


def _is_attention(origin: Origin, name: str) -> bool:
    namespace, _, op = origin.own.partition("::")
    if namespace == "gem_attention":
        return not op.startswith(_NO_ATTENTION)
    return bool(_ATTENTION_OPS.match(origin.inner) or _ATTENTION_KERNELS.search(name))
