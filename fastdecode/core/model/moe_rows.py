"""How rows of families read mixtures of experts from ``config.json``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastdecode.core.errors import UnsupportedModelError
from fastdecode.core.model.config_reader import ConfigReader
from fastdecode.core.model.moe import MlpKind, Moe, Router
from fastdecode.core.model.rows import MAX_INTERMEDIATE, Read
from fastdecode.core.model.spec import ModelSpec
from fastdecode.core.spec import MAX_LAYERS

MAX_EXPERTS = 1 << 14


def experts(
    router: Read[Router],
    *,
    num: tuple[str, ...] = ("num_experts", "num_local_experts"),
    top_k: tuple[str, ...] = ("num_experts_per_tok",),
    inner: tuple[str, ...] = ("moe_intermediate_size",),
    defaults: tuple[int | None, int | None, int | None] = (None, None, None),
    more: Read[dict[str, object]] | None = None,
) -> Read[Moe]:
    """The experts of a family.

    Args:
        num, top_k, inner: names of fields, newest first.
        defaults: of these three, where the field is missing.
        more: further fields of ``Moe``.
    """

    def read(reader: ConfigReader, spec: ModelSpec) -> Moe:
        count = reader.integer(*num, high=MAX_EXPERTS, default=defaults[0])
        return Moe(
            num_experts=count,
            top_k=reader.integer(*top_k, high=count, default=defaults[1]),
            inner=reader.integer(*inner, high=MAX_INTERMEDIATE, default=defaults[2]),
            router=_checked(reader, router(reader, spec), count),
            **(more(reader, spec) if more else {}),  # type: ignore[arg-type]
        )

    return read


def _checked(reader: ConfigReader, router: Router, num_experts: int) -> Router:
    if num_experts % router.groups:
        rule = f"a divisor of the {num_experts} experts"
        raise reader.refuse("n_group", router.groups, rule)
    if router.kept > router.groups:
        raise reader.refuse("topk_group", router.kept, f"at most the {router.groups} groups")
    return router


def shared(
    *names: str,
    times: str | None = None,
    count: int = 1,
    default: int = 0,
    **constants: object,
) -> Read[dict[str, object]]:
    """The shared expert's inner dims: a field, times another one.

    Args:
        times: how many shared experts there are, side by side: 0 or null is none.
        count: how many where that field is missing.
        default: the dims where theirs is.
        constants: further fields of ``Moe``.
    """

    def read(reader: ConfigReader, spec: ModelSpec) -> dict[str, object]:
        most = MAX_INTERMEDIATE
        num = reader.integer(times, low=0, high=64, default=count) if times else 1
        inner = reader.integer(*names, low=0, high=most, default=default) if num else 0
        return {"shared_inner": num * inner, **constants}

    return read


def clamped_gate(reader: ConfigReader, spec: ModelSpec) -> dict[str, object]:
    """gpt-oss's experts."""
    limit = reader.number("swiglu_limit", high=1e6, default=7.0)
    alpha = reader.number("swiglu_alpha", high=1e6, default=1.702)
    return {"gate": "clamped", "limit": limit, "alpha": alpha, "biases": True}


def layer_limits(name: str) -> Read[tuple[float, ...]]:
    """Limit of the gate of each layer: null and 0 are none; no layer has one
    where the list is missing or empty."""

    def read(reader: ConfigReader, spec: ModelSpec) -> tuple[float, ...]:
        found = reader.fields.get(name) or ()
        rule = f"a list of {spec.num_layers} numbers from 0, or null, one a layer"
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise reader.refuse(name, found, rule)
        limits = tuple(0 if limit is None else limit for limit in found)
        if len(limits) not in (0, spec.num_layers) or not all(map(_is_limit, limits)):
            raise reader.refuse(name, found, rule)
        return tuple(map(float, limits)) if any(limits) else ()

    return read


def _is_limit(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1e6  # type: ignore[operator]


# --- Which layers have them


def mlps(rule: Read[Callable[[int], bool]]) -> Read[tuple[MlpKind, ...]]:
    """What each layer's MLP is: ``mlp_layer_types`` says it, or else the
    family's rule says which have experts."""

    def read(reader: ConfigReader, spec: ModelSpec) -> tuple[MlpKind, ...]:
        named = reader.strings("mlp_layer_types")
        if not named:
            is_sparse = rule(reader, spec)
            return tuple(
                "experts" if is_sparse(layer) else "dense" for layer in range(spec.num_layers)
            )
        if len(named) != spec.num_layers or not set(named) <= {"sparse", "dense"}:
            rule_text = f"{spec.num_layers} entries, one a layer, each sparse or dense"
            raise reader.refuse("mlp_layer_types", named, rule_text)
        return tuple("experts" if kind == "sparse" else "dense" for kind in named)

    return read


def layers_from(name: str, default: int) -> Read[Callable[[int], bool]]:
    """Choose all layers but the leading ones that field ``name`` counts."""

    def read(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
        first = reader.integer(name, low=0, high=MAX_LAYERS, default=default)
        return lambda layer: layer >= first

    return read


def after_dense(default: int) -> Read[Callable[[int], bool]]:
    return layers_from("first_k_dense_replace", default)


def by_step(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    """Every ``decoder_sparse_step``-th layer that isn't in ``mlp_only_layers``."""
    step = reader.integer("decoder_sparse_step", high=MAX_LAYERS, default=1)
    dense = reader.token_ids("mlp_only_layers")
    return lambda layer: layer not in dense and (layer + 1) % step == 0


def by_interval(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    """ERNIE's: every n-th layer between a first and a last one."""
    interval = reader.integer("moe_layer_interval", high=MAX_LAYERS, default=1)
    start = reader.integer("moe_layer_start_index", low=0, high=MAX_LAYERS, default=1)
    end = reader.integer("moe_layer_end_index", low=-1, high=MAX_LAYERS, default=-1)
    last = spec.num_layers - 1 if end == -1 else end
    return lambda layer: (layer + 1) % interval == 0 and start <= layer <= last


def listed(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    """Llama-4's: ``moe_layers``, or every n-th."""
    named = reader.fields.get("moe_layers")
    layers = reader.token_ids("moe_layers")
    step = reader.integer("interleave_moe_layer_step", high=MAX_LAYERS, default=1)
    if named is None:
        return lambda layer: (layer + 1) % step == 0
    return lambda layer: layer in layers


def enumerated(reader: ConfigReader, spec: ModelSpec) -> Callable[[int], bool]:
    """Step's: ``moe_layers_enum``, a list or numbers with commas, or else all
    but the first three."""
    found = reader.fields.get("moe_layers_enum")
    if found is None:
        return after_dense(3)(reader, spec)
    rule = "numbers of layers, in a list or with commas"
    items = found.split(",") if isinstance(found, str) else found
    if not isinstance(items, Sequence):
        raise reader.refuse("moe_layers_enum", found, rule)
    numbers = [str(item).strip() for item in items if str(item).strip()]
    if not all(number.isdecimal() and len(number) < 9 for number in numbers):
        raise reader.refuse("moe_layers_enum", found, rule)
    layers = frozenset(map(int, numbers))
    return lambda layer: layer in layers


# --- Routers


def always(router: Router) -> Read[Router]:
    return lambda reader, spec: router


def softmax_router(
    renorm: bool | None = None, *, default: bool = False, rounded: bool = True
) -> Read[Router]:
    """Return the reader of a softmax over all experts.

    Args:
        renorm: Whether the chosen weights are divided by their sum. None reads it from
            ``norm_topk_prob``, which ``default`` stands for where it is missing.
    """

    def read(reader: ConfigReader, spec: ModelSpec) -> Router:
        divides = reader.flag("norm_topk_prob", default) if renorm is None else renorm
        return Router(renorm=divides, rounded=rounded)

    return read


def deepseek_router(renorm: bool) -> Read[Router]:
    """DeepSeek-V3's: sigmoid, a correction, groups. ``renorm``: where
    ``norm_topk_prob`` is missing."""

    def read(reader: ConfigReader, spec: ModelSpec) -> Router:
        return Router(
            "sigmoid",
            wide=True,
            correction=True,
            groups=reader.integer("n_group", high=MAX_EXPERTS, default=1),
            kept=reader.integer("topk_group", high=MAX_EXPERTS, default=1),
            renorm=reader.flag("norm_topk_prob", renorm),
            eps=1e-20,
            scale=reader.number("routed_scaling_factor", default=1.0),
            sorted=False,
        )

    return read


def ernie_router(reader: ConfigReader, spec: ModelSpec) -> Router:
    floor = reader.number("moe_norm_min", high=1.0, default=1e-12)
    return Router(wide=True, correction=True, renorm=True, floor=floor, rounded=True)


def afmoe_router(reader: ConfigReader, spec: ModelSpec) -> Router:
    scale = reader.number("route_scale", default=1.0)
    return Router("sigmoid", correction=True, renorm=True, eps=1e-20, scale=scale)


def laguna_router(reader: ConfigReader, spec: ModelSpec) -> Router:
    name = "moe_router_logit_softcapping"
    softcap = reader.number(name, high=1e6) if reader.fields.get(name) else None  # 0: none
    return Router("sigmoid", correction=True, renorm=True, softcap=softcap, rounded=True)


def laguna_shared(reader: ConfigReader, spec: ModelSpec) -> dict[str, object]:
    scale = reader.number("moe_routed_scaling_factor", default=1.0)
    inner = shared("shared_expert_intermediate_size", default=512)
    return {**inner(reader, spec), "scale_after": scale}


def step_router(reader: ConfigReader, spec: ModelSpec) -> Router:
    score = reader.string("moe_router_activation", "scoring_func", default="sigmoid")
    if score != "sigmoid":
        raise UnsupportedModelError(
            f"{reader.where}: Step's router with {score!r} isn't implemented. Use a checkpoint "
            "whose 'moe_router_activation' is 'sigmoid'."
        )
    wide = reader.flag("need_fp32_gate", False)
    return Router("sigmoid", wide=wide, correction=True, renorm=True, sorted=False)


def step_shared(reader: ConfigReader, spec: ModelSpec) -> dict[str, object]:
    scale = reader.number("moe_router_scaling_factor", default=1.0)
    inner = shared("share_expert_dim", "share_expert_dims", default=1280)
    return {**inner(reader, spec), "scale_after": scale}


def cohere_router(reader: ConfigReader, spec: ModelSpec) -> Router:
    score = reader.string("expert_selection_fn", default="softmax")
    if score == "softmax":
        return Router(chosen_first=True, rounded=True)
    if score != "sigmoid":
        raise reader.refuse("expert_selection_fn", score, "softmax or sigmoid")
    renorm = reader.flag("norm_topk_prob", True)
    return Router("sigmoid", chosen_first=True, renorm=renorm, rounded=True, narrow=True)


def cohere_shared(reader: ConfigReader, spec: ModelSpec) -> dict[str, object]:
    strategy = reader.string("shared_expert_combination_strategy", default="average")
    if strategy not in ("average", "sum"):
        raise reader.refuse("shared_expert_combination_strategy", strategy, "average or sum")
    inner = shared("intermediate_size", times="num_shared_experts", count=0)(reader, spec)
    return {**inner, "shared_average": strategy == "average" and bool(inner["shared_inner"])}


def hy_router(reader: ConfigReader, spec: ModelSpec) -> Router:
    scale = reader.number("router_scaling_factor", default=2.826)
    return Router(
        "sigmoid", wide=True, correction=True, renorm=True, eps=1e-20, scale=scale, sorted=False
    )
