"""``fastdecode plan goodput --semantics published``: what the authors' simulator
would say."""

from __future__ import annotations

import argparse
import json

from fastdecode.cli.options import EXIT_INFEASIBLE, tell
from fastdecode.cli.plan.load import read_load
from fastdecode.core.errors import ConfigError

MAX_GPU_RATE = 16.0
STEP = 0.25


def run_published(args: argparse.Namespace) -> int:
    """Print every placement's goodput a GPU, and the best. Returns the exit code."""
    from cost_model.goodput.published.profile import published_model
    from cost_model.goodput.published.search import SearchQuestion, best_placement, placements

    if args.emit is not None:
        raise ConfigError(
            "--emit: a placement of the published simulator is nothing to run; leave "
            "--semantics published out"
        )
    model = published_model(args.model)
    args.rate = args.rate or 1.0
    load, _, described = read_load(args)
    asked = SearchQuestion(load.draw.gaps, load.draw.lengths, load.slo, MAX_GPU_RATE, STEP)
    is_high = args.affinity == "high"
    candidates = placements(model, args.nodes, args.gpus_per_node, is_high_affinity=is_high)
    best, found = best_placement(model, candidates, asked)
    tell(f"published semantics: A100-80GB profile of LLMServe/DistServe, {described}")
    ordered = sorted(found, key=lambda each: (-found[each], each.num_gpus, each))
    if args.json:
        goodputs = {str(each): found[each] for each in ordered}
        tree = {
            "format": "fastdecode.plan.published",
            "version": 1,
            "model": model.name,
            "best": str(best),
            "num_gpus": best.num_gpus,
            "goodput_per_gpu": goodputs,
        }
        print(json.dumps(tree, indent=2))
    else:
        print("requests a second and GPU, by pp_cross,tp_prefill,pp_prefill,tp_decode,pp_decode")
        for each in ordered:
            print(f"  {each!s:<12} {found[each]:<8g} {each.num_gpus} GPUs")
    return 0 if found[best] > 0 else EXIT_INFEASIBLE
