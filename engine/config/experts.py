"""Convert transformers' fields of mixtures of experts to an ExpertsConfig."""

from collections.abc import Mapping
from typing import Any

from baton.engine.config.families import Family, GroupedExperts
from baton.engine.config.model_config import ExpertsConfig, ModelError, StackedExperts
from baton.kernels.types import GatingFunction, Routing

UNGROUPED, GROUPED = "greedy", "group_limited_greedy"


def experts_config(name: str, family: Family, fields: Mapping[str, Any]) -> ExpertsConfig | None:
    """Convert a family's fields; None without experts. Layers and routing are those of the family's transformers code.

    Raises: ModelError.
    """
    every = range(int(fields["num_hidden_layers"]))
    if family.grouped_experts is not None:
        return _grouped(family.grouped_experts, fields)
    if name == "mixtral":
        layers, inner, normalised = frozenset(every), fields["intermediate_size"], True
    elif name in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text") and fields["num_local_experts"]:
        step, dense = fields.get("decoder_sparse_step", 1), fields.get("mlp_only_layers", ())
        layers = frozenset(index for index in every if index not in dense and (index + 1) % step == 0)
        inner, normalised = fields["moe_intermediate_size"], fields.get("norm_topk_prob", True)
    elif name == "granitemoehybrid" and fields["num_local_experts"]:
        # Its softmax over the chosen experts equals a normalised softmax over all.
        count, inner = fields["num_local_experts"], fields["intermediate_size"]
        routing = Routing(_per_token(fields, count), normalised=True)
        shared = int(fields["shared_intermediate_size"])
        return ExpertsConfig(frozenset(every), count, inner, routing, shared)
    elif name == "lfm2_moe":
        count, layers = fields["num_experts"], frozenset(range(int(fields["num_dense_layers"]), len(every)))
        routing = Routing(
            per_token=_per_token(fields, count),
            normalised=bool(fields["norm_topk_prob"]),
            odds=GatingFunction.SIGMOID,
            corrected=bool(fields["use_expert_bias"]),
            scale=float(fields["routed_scaling_factor"]),
        )
        return ExpertsConfig(layers, count, fields["moe_intermediate_size"], routing) if layers else None
    elif name == "gemma4_text" and fields["enable_moe_block"]:
        layers, inner, normalised = frozenset(every), fields["moe_intermediate_size"], True
    elif name == "gpt_oss":  # its softmax over the chosen experts equals a normalised softmax over all
        layers, inner, normalised = frozenset(every), fields["intermediate_size"], True
    elif name == "llama4_text":
        return _llama4(fields)
    else:
        return None
    count, biased = fields["num_local_experts"], name == "gpt_oss"
    routing = Routing(_per_token(fields, count), normalised, biased=biased)
    shared = int(fields.get("shared_expert_intermediate_size") or 0)
    stacked = StackedExperts.INTERLEAVED if biased else StackedExperts.ROWS
    return ExpertsConfig(layers, count, inner, routing, shared, gates_shared=shared > 0, stacked=stacked, biased=biased)


def _llama4(fields: Mapping[str, Any]) -> ExpertsConfig | None:
    layers, inner = frozenset(fields["moe_layers"]), int(fields["intermediate_size"])
    count = fields["num_local_experts"]
    if not layers:
        return None
    routing = Routing(_per_token(fields, count), normalised=False, odds=GatingFunction.SIGMOID)
    return ExpertsConfig(layers, count, inner, routing, inner, scales_inputs=True, stacked=StackedExperts.COLUMNS)


def _grouped(grouped: GroupedExperts, fields: Mapping[str, Any]) -> ExpertsConfig | None:
    for name, only in (("moe_layer_freq", 1), ("scoring_func", grouped.odds.value)):
        if fields.get(name, only) != only:
            # transformers ignores the field and would compute another model.
            raise ModelError(f"config.json: {name} {fields[name]!r} is not supported; supported: {only!r}")
    layers = fields.get("expert_layers")
    if layers is None:
        layers = range(int(fields["first_k_dense_replace"]), int(fields["num_hidden_layers"]))
    if not layers:
        return None
    count, inner = int(fields["n_routed_experts"]), int(fields["moe_intermediate_size"])
    per_token = _per_token(fields, count)
    groups, kept = _groups(grouped, fields, count, per_token)
    routing = Routing(
        per_token=per_token,
        normalised=grouped.normalised is not None and bool(fields[grouped.normalised]),
        odds=grouped.odds,
        groups=groups,
        kept_groups=kept,
        judged_by=grouped.judged_by,
        corrected=grouped.corrected,
        scale=float(fields["routed_scaling_factor"]),
        wide=True,
    )
    shared = fields.get("shared_expert_intermediate_size") or inner * int(fields["n_shared_experts"])
    return ExpertsConfig(frozenset(layers), count, inner, routing, int(shared))


def _groups(grouped: GroupedExperts, fields: Mapping[str, Any], count: int, per_token: int) -> tuple[int, int]:
    """Return the number of expert groups, and the number of groups that a token may use."""
    method = GROUPED if grouped.methods is None else fields[grouped.methods]
    if method not in (UNGROUPED, GROUPED):
        raise ModelError(f"config.json: {grouped.methods} {method!r} is neither {UNGROUPED!r} nor {GROUPED!r}")
    if method == UNGROUPED:
        return 1, 1
    groups, kept = int(fields["n_group"] or 1), int(fields["topk_group"] or 1)
    if groups < 1 or count % groups or count // groups < grouped.judged_by:
        raise ModelError(f"config.json: n_group {groups} does not make groups of n_routed_experts {count}")
    if not 1 <= kept <= groups:
        raise ModelError(f"config.json: topk_group {kept} is not in 1 to {groups}, the number of groups (n_group)")
    if per_token > kept * (count // groups):
        raise ModelError(
            f"config.json: topk_group {kept} groups have fewer than num_experts_per_tok {per_token} experts"
        )
    return groups, kept


def _per_token(fields: Mapping[str, Any], count: int) -> int:
    per_token = int(fields["num_experts_per_tok"] or 0)
    if not 1 <= per_token <= count:
        raise ModelError(f"config.json: num_experts_per_tok {per_token} is not in 1 to {count}, the number of experts")
    return per_token
