"""Models in a repository, recognised by file names and sizes, and the choice of one.

A repository mostly holds one model in many types of weights, named for them. QUALITY has the types
from best to worst, by divergence from the unrounded model (docs/formats.md). Q8_0 is where it
becomes too small to matter, so nothing larger is taken if there is a choice. Below three bits a
model answers worse than a smaller one in four, so such a type must be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from treadle.base.fast_classes import dataclass
from treadle.files.projector_files import named_for_another, ranked_projectors
from treadle.files.splits import SHARD, shard_name

QUALITY = (
    *("Q8_0", "Q6_K_XL", "Q6_K_L", "Q6_K", "IQ6_K"),
    *("Q5_K_XL", "Q5_K_L", "Q5_K_M", "Q5_K_S", "IQ5_K", "IQ5_KS", "Q5_1", "Q5_0"),
    *("Q4_K_XL", "Q4_K_L", "Q4_K_M", "Q4_K_S", "IQ4_K", "IQ4_NL", "IQ4_KS", "IQ4_XS"),
    *("Q4_1", "Q4_0", "MXFP4", "IQ4_KSS", "IQ4_KT"),
    *("Q3_K_XL", "Q3_K_L", "Q3_K_M", "IQ3_M", "IQ3_S", "Q3_K_S", "IQ3_XS", "IQ3_XXS"),
    *("IQ3_K", "IQ3_KS", "IQ3_KT"),
)
LARGER = ("Q8_K_XL", "BF16", "F16", "F32")  # taken only if there is nothing smaller
ALIASES = {"FP16": "F16", "FP32": "F32", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "Q3_K": "Q3_K_M"}
RANKS = {tag: rank for rank, tag in enumerate((*QUALITY, *LARGER))}

TAG = re.compile(
    r"(?:^|(?<=[-._/]))(?:(?:ud|i1)-)?(?P<tag>"
    r"(?:iq|tq|q)\d(?:_(?:\d|kss|ks|kt|k|xxs|xs|s|m|l|xl|nl|p))+|mxfp4(?:_moe)?|nvfp4|bf16|fp?16|fp?32"
    r")(?=$|[-._/])",
    re.IGNORECASE,
)
NO_MODEL = re.compile(  # files beside a model that are not models by themselves
    r"(?:^|[-._/])(?:mmproj|imatrix|vocab|draft|mtp|lora|adapter|eagle\d?|dflash\d?|dspark)(?:$|[-._/])",
    re.IGNORECASE,
)
REPACKED = re.compile(r"Q4_0_\d_\d|IQ4_NL_\d_\d")  # for Arm, dropped by ggml in 2024

ROOM = 1 << 30  # bytes besides the weights
ROOM_SHARE = 1 / 8  # further bytes per byte of weights


@dataclass(frozen=True)
class RepositoryModel:
    """One model of a repository: a GGUF file, or all its shards."""

    paths: tuple[str, ...]  # within the repository; shards in order
    n_bytes: int
    tag: str  # type stated in its name: "Q4_K_M"; "" if there is none
    stem: str  # rest of its name: the same for one model in many types

    @property
    def needs(self) -> int:
        """Estimated bytes of memory to run the model: weights, KV cache of 4096 tokens, the
        program.

        A file's name does not tell the number of KV heads.
        """
        return int(self.n_bytes * (1 + ROOM_SHARE)) + ROOM

    @property
    def label(self) -> str:
        """The shortest name for the user: the type of weights, or the file if its name has no
        type.
        """
        return self.tag or self.paths[0]


def find_offers(files: Mapping[str, int]) -> list[RepositoryModel]:
    """Return the models in ``files`` (path to bytes), the best first; split models only if
    complete.
    """
    sizes = {path: n for path, n in files.items() if path.lower().endswith(".gguf")}
    models = {path: n for path, n in sizes.items() if not NO_MODEL.search(path)}
    offers = []
    for path in models:
        paths: tuple[str, ...] = (path,)
        if match := SHARD.fullmatch(path):
            count = int(match["count"])
            if int(match["no"]) != 1 or count > len(models):
                continue
            paths = tuple(shard_name(match["stem"], i, count) for i in range(count))
            if not all(shard in models for shard in paths):
                continue
        tag, stem = tag_of(path)
        if not REPACKED.fullmatch(tag):
            offers.append(RepositoryModel(paths, sum(models[shard] for shard in paths), tag, stem))
    return sorted(offers, key=lambda offer: (rank(offer), -offer.n_bytes, offer.paths))


def find_projector(files: Mapping[str, int], model: RepositoryModel) -> str | None:
    """Return the projector file for a model among ``files``: one in its folder or in those above;
    of several the one named for the model, and F16 before BF16 before Q8_0. None if there is none,
    or if the repository has several models and the likeliest projector is named for another.
    """
    first = PurePosixPath(model.paths[0])
    ranked = projectors_near(files, str(first.parent), first.name)
    models = {offer.stem for offer in find_offers(files)}
    if not ranked or (len(models) > 1 and named_for_another(ranked[0], first.name)):
        return None
    return ranked[0]


def projectors_near(files: Mapping[str, int], folder: str, model: str = "") -> list[str]:
    """Return the projector files of a repository that are in ``folder`` or above it, the most
    likely one for the model file ``model`` first.
    """
    at = PurePosixPath(folder)
    near = [path for path in files if PurePosixPath(path).parent in (at, *at.parents)]
    return ranked_projectors(near, model)


def tag_of(path: str) -> tuple[str, str]:
    """Return the type of weights in a file's name ("Q4_K_M", "" if there is none), and the rest of
    the name, which is the same for one model in many types.
    """
    match = SHARD.fullmatch(path)
    bare = match["stem"] if match else path[: -len(".gguf")]
    found = [m["tag"].upper() for m in TAG.finditer(bare)]
    stem = re.sub(r"[-._/]+", "-", TAG.sub("", bare)).strip("-").lower()
    tag = found[-1] if found else ""
    return ALIASES.get(tag, tag) if tag.startswith("F") else tag, stem


def rank(offer: RepositoryModel) -> int:
    """Return the place of the model's type in ``QUALITY``, then ``LARGER``, 0 for the best; an
    unknown type comes last.
    """
    return RANKS.get(ALIASES.get(offer.tag, offer.tag), len(RANKS))


def tagged(offers: Iterable[RepositoryModel], tag: str) -> list[RepositoryModel]:
    """Return the models of type ``tag``, in any letter case; Q4_K stands for Q4_K_M.

    "" and Ollama's "latest" stand for all types.
    """
    if tag in ("", "latest"):
        return list(offers)
    wanted = tag.upper().removeprefix("UD-").removeprefix("I1-")
    names = {wanted, ALIASES.get(wanted, wanted)}
    return [offer for offer in offers if names & {offer.tag, ALIASES.get(offer.tag, offer.tag)}]


def one_model(offers: list[RepositoryModel], repo: str) -> list[RepositoryModel]:
    """Return ``offers`` if they are of one model; of several models, those of the one that the
    repository ``repo`` is named for, [] if there is none.
    """
    stems = {offer.stem for offer in offers}
    if len(stems) > 1:
        name = PurePosixPath(repo).name.lower()
        own = {re.sub(r"[-._]+", "-", re.sub(r"[-._]gguf$", "", name)).strip("-")}
        return [offer for offer in offers if offer.stem in own]
    return offers


def best(offers: list[RepositoryModel], n_free: int | None) -> RepositoryModel | None:
    """Return the best of ``offers`` that fits into ``n_free`` bytes of memory (None: unknown); None
    if none does.

    ``offers`` are of one model. A single one is taken whatever its type. Of several, types larger
    than Q8_0 are taken only if there are no others, and types below 3 bits never.
    """
    fit = [offer for offer in offers if n_free is None or offer.needs <= n_free]
    if len(offers) == 1:
        return fit[0] if fit else None
    usual = [offer for offer in offers if rank(offer) < len(QUALITY)]
    larger = [offer for offer in offers if len(QUALITY) <= rank(offer) < len(RANKS)]
    return next((offer for offer in usual or larger if offer in fit), None)
