"""What a state holds beside tensors: the structure of the program, and what the guide has learnt of it."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pyro
import torch
from pyro.infer.autoguide.utils import deep_setattr
from torch import Tensor

from ..modules import path_of
from ..program.data import TrainingData, is_plain, map_tensors
from ..program.structure import Structure
from .field import make_field
from .known import Core, Coupling, KnownGuide
from .latents import couple
from .moving import follow
from .points import Points

# Of a field, which has them where its members, hyperparameters and data ask for them.
_BUFFERS = ("field.rows_", "field.slopes", "field.coefficients.log_weight")


def saved_of(guide: KnownGuide) -> dict[str, Any]:
    """In plain Python, with the parameters' name in Pyro's store, and data that predictions need."""
    core = guide.core
    follow(guide)  # which a state that is loaded has no data for
    state: dict[str, Any] = {
        "name": guide._pyro_name,
        "structure": core.facts.to_json(),
        "joint": asdict(core.joint),
        "modules": {name: module.spec() for name, module in guide.modules_by_site().items()},
        "sizes": core.sizes,
        "num_nodes": core.num_nodes,
        "parameters": sums_of(core.own),
    }
    if core.data is not None and guide.is_about_rows and is_plain([core.data.args, core.data.kwargs]):
        shown = {what: value for what, (value, _) in core.data.shown.items()}  # of the same memory as arguments
        state["data"] = {"args": core.data.args, "kwargs": core.data.kwargs, "shown": shown}
    return state if core.points is None else {**state, "points": vars(core.points)}


def sums_of(names: Iterable[str]) -> dict[str, float]:
    """The sums of parameters in Pyro's store: a state tells others of the same names from its own."""
    store = pyro.get_param_store()
    # as float32 has each number, which a model in float64 has, too
    return {name: float(store[name].detach().float().double().sum()) for name in names if name in store}


def require_parameters(own: Mapping[str, float]) -> None:
    """Raise if the sums of the model's own parameters are not those that a state was saved with."""
    found = sums_of(own)
    if others := [n for n, total in own.items() if not math.isclose(found.get(n, math.nan), total, rel_tol=1e-6)]:
        raise ValueError(
            f"the guide's state was saved beside other values of the model's own parameters {others}, and does not "
            "hold them. Load them before the guide is called, by model.load_state_dict or pyro.get_param_store().load."
        )


def resume(guide: KnownGuide, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Make a guide what a state of these tensors is to be loaded into; raise if it is of other families."""
    saved = saved if "structure" in saved else _of_earlier_release(saved)
    now, modules = guide.core, {name: module.spec() for name, module in guide.modules_by_site().items()}
    joint = Coupling(**{key: part for key, part in saved["joint"].items() if key in Coupling.__dataclass_fields__})
    found = Core(Structure.from_json(saved["structure"]), joint, dict(saved["sizes"]), loaded=True)
    found.num_nodes, found.own = saved["num_nodes"], saved.get("parameters", {})
    # A guide that was called keeps its parameters, which an optimiser may have.
    before, after = ((core.facts.latents, core.joint.hyper, core.joint.field) for core in (now, found))
    if modules != saved["modules"] or before != after:
        guide.forget()
        guide.core = found
        _make_parameters(guide, saved["modules"], tensors)
    guide.core = found
    if "points" in saved:
        found.points = map_tensors(lambda t: t.to(guide.like), Points(**saved["points"]))
    for key in [key for key in tensors if key.startswith(_BUFFERS)]:
        path, _, leaf = key.rpartition(".")
        guide.get_submodule(path).register_buffer(leaf, torch.zeros_like(tensors[key]))
    if "data" in saved:
        data, like = TrainingData(guide.model, saved["data"]["args"], saved["data"]["kwargs"]), guide.like
        data.note(saved["data"].get("shown", {}))
        found.data = data.mapped(lambda t: t.to(like if t.is_floating_point() else like.device), guide.model)


def _make_parameters(guide: KnownGuide, modules: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    facts, joint = guide.core.facts, guide.joint
    places = {n: f"{path_of(n)}_unconstrained" for n, latent in facts.latents.items() if latent.shape is not None}
    alone = {name: place for name, place in places.items() if f"locs.{place}" in tensors}
    points = {name for name, place in alone.items() if f"scales.{place}" not in tensors}
    others = points ^ {*filter(guide.is_point, places)} | {*filter(guide.is_independent, places.keys() - alone)}
    if others:
        raise ValueError(
            f"the saved posterior of latent site {min(others)!r} is of another kind (a point, joint, or independent) "
            "than this guide's: make the guide with the point_estimates= and independent= that it was saved with."
        )
    for name, place in alone.items():
        guide.set_latent(name, torch.zeros_like(tensors[f"locs.{place}"]), facts.latents[name].event_dim)
    for name, spec in modules.items():
        path = f"gps.{path_of(name)}"
        own = (tensor for key, tensor in tensors.items() if key.startswith(f"{path}."))
        like = next(filter(torch.is_floating_point, own))
        deep_setattr(guide, path, guide.family_of(name).rebuild(spec, like, name))
        guide.like = like
    if joint.hyper:
        like = tensors["together.loc"]
        couple(guide, torch.zeros_like(like), torch.eye(len(like)).to(like))
    if joint.field:
        make_field(guide, joint.field)


def _of_earlier_release(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A state whose facts of the program were lists of names, in today's form; some had no more than the first ones."""
    of: Any = {"data_plates": [], "grouped": [], "inner": [], "groups": {}, "quadratic": [], "columns": {}}
    of |= {"enumerated": [], "classes": [], "interactions": [], "summed": [], "kinds": {}, "num_nodes": 20, **saved}
    groups = {name: dict(zip(("size", "layer"), group)) for name, group in of["groups"].items()}
    gps = {
        name: {"outputs": spec["batch_shape"], "columns": of["columns"].get(name), "group": groups.get(name)}
        | {"depends": of["dependence"][name], "is_inner": name in of["inner"], "is_quadratic": name in of["quadratic"]}
        for name, spec in of["gps"].items()
    }
    roles = dict.fromkeys(of["latents"], "row") | dict.fromkeys(of["grouped"], "group")
    apart = [name for name, own in of["latents"].items() if own["plates"].keys().isdisjoint(of["data_plates"])]
    roles |= dict.fromkeys(apart, "all")
    densities = {
        name: {"distribution": of["kinds"].get(name, ""), "is_observed": name in of["rows"]}
        for name in [*of["rows"], *of["downstream"]]
    }
    for name in of["downstream"]:  # it is not known on which GP sites it depends
        densities[name]["gps"] = [*gps]
    structure = {
        "gps": gps,
        "latents": {name: {**own, "role": roles[name]} for name, own in of["latents"].items()},
        "densities": densities,
        "discrete": {name: "all" if name in of["classes"] else "row" for name in of["enumerated"]},
        "meeting": of["interactions"],
        "summed": of["summed"],
    }
    known = {key: of[key] for key in Coupling.__dataclass_fields__ if key in saved} | {"hyper": of.get("coupled", [])}
    joint = {key: tuple(part) if isinstance(part, list) else part for key, part in known.items()}
    return of | {"structure": json.dumps(structure), "joint": joint, "modules": of["gps"], "sizes": of["rows"]}
