"""``load`` and ``Model``: text, logits, states, vectors and scores of one loaded model."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, overload

import numpy as np

from treadle.api.generation import Generation, in_order
from treadle.api.options import (
    RULES,
    SAMPLING_FIELDS,
    GivenSampling,
    adapter_scales,
    add_adapters,
    add_control_vectors,
    alternatives,
    build_sampling,
    check_choices,
    check_session,
    choose_context,
    find_path,
    keywords_elsewhere,
    open_found,
    output_tokenizer,
    read_defaults,
    read_sizes,
    refuse_drafter,
    shared,
    token_limit,
)
from treadle.base.caller_warnings import warn
from treadle.base.fast_classes import cached_property
from treadle.base.validate import file_name, flag, iterated, listed, ranged, suggesting, token_ids
from treadle.devices import open_device
from treadle.devices.cpu.mapping_faults import guard_mappings
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.errors import ForkedError, TreadleError, UnsupportedError, of_setting
from treadle.kvcache.page_pool import MIN_SAVING_AT_BRANCH
from treadle.machine.topology import usable_threads
from treadle.models.stored_config import open_config
from treadle.sampling import Sampler, Sampling, TokenConstraint, recommended
from treadle.scheduler.output import IndentStop, RequestOutput, stop_strings
from treadle.scheduler.request import MediaPrompt, Request
from treadle.scheduler.scheduler import CooperativeStepper, Scheduler

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from treadle.api.control_vector import ControlVectors
    from treadle.api.hooks import AttentionWeights, LensLogits, PatchFunction, Trace
    from treadle.api.media import ModelMedia
    from treadle.api.session import Session
    from treadle.api.tool_chat import Reply, Tool
    from treadle.chat.messages import ChatMessages
    from treadle.chat.prompt import ChatPrompt
    from treadle.chat.system_prefix import SystemPrefixes
    from treadle.chat.template.template import ChatTemplate
    from treadle.chat.tools import Thought
    from treadle.chat.tools.answer_plan import AnswerPlan
    from treadle.convert.lora.lora import Adapters
    from treadle.devices.protocol import Device
    from treadle.engine.hooks import EngineHooks
    from treadle.grammar.compiled_cache import Grammars
    from treadle.grammar.json_schema import Schema
    from treadle.isa.isa import Isa
    from treadle.media.marks import MediaMarks
    from treadle.plan.plan import Plan
    from treadle.tokenizer.tokenizer import Tokenizer

CACHE_BYTES = 4 << 30  # default size limit of page files
Messages = Sequence[dict[str, Any]]
Progress = Callable[[str, int, int], None]
T = TypeVar("T")


@suggesting(keywords_elsewhere)
def load(
    path: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    context: int | None = None,
    deterministic: bool = False,
    kv: str = "f16",
    n_sequences: int = 1,
    kv_bytes: int | None = None,
    kv_tokens: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    speculate: bool | None = None,
    draft: str | os.PathLike[str] | None = None,
    lora: Adapters = (),
    control_vectors: ControlVectors = (),
    control_vector_layers: tuple[int, int] | None = None,
    mmproj: str | os.PathLike[str] | bool | None = None,
    image_max_tokens: int | None = None,
    media_urls: bool | Sequence[str] = True,
    device: str = "cpu",
    isa: str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning: str = "auto",
    reasoning_budget: int | None = None,
    reasoning_budget_message: str = "",
    reasoning_preserve: bool | None = None,
    sampling: GivenSampling = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Open a model. The file is mapped, not read.

    - ``path``: a GGUF file, or the first shard of one; a Hugging Face folder; a name on the hub,
      ``hf:OWNER/REPO:TYPE``, which is downloaded once; or the short name of a downloaded model, as
      ``treadle list`` shows it. None: the small model in the package.

    Computation:

    - ``threads``: None for the number of usable performance cores.
    - ``device``: "cpu"; "cuda" for an NVIDIA GPU, "cuda:1" for the second; "wgpu" for a GPU through
      WebGPU.
    - ``isa``: the name of an instruction set, None for the best of this machine.
    - ``deterministic``: results are bit-identical whatever else is in a batch and however a text is
      split into runs; otherwise they are equal up to rounding.
    - ``speculate``: draft tokens from n-grams of the sequence itself, and check them in the same
      step. None: only for models with layers of their own that predict further tokens.
    - ``draft``: a smaller model with the same vocabulary, which drafts tokens, or a drafter that
      was trained for this one (EAGLE 3, DFlash, Gemma 4's assistant).
    - ``progress``: called as ``progress(stage, done, total)`` during long work.

    Memory for keys and values (the KV cache):

    - ``context``: maximum tokens of a sequence. None: the model's own up to 4096 (or
      ``kv_tokens``), for encoders 8192.
    - ``kv``: type of keys and values, "f16", "bf16", "f32", "q8_0", "q5_1", "q5_0", "iq4_nl" or
      "q4_0"; two types, of keys and of values: "q8_0-q4_0".
    - ``n_sequences``: number of full sequences that fit at once.
    - ``kv_bytes``, ``kv_tokens``: limits for all sequences together, None for no other limit.
    - ``cache_dir``: a folder of files that keep cached prefixes after the process ends, at most
      ``cache_bytes`` in all.

    Further files:

    - ``lora``: adapters, each a path or a path and a scale.
    - ``control_vectors``: each a path or a ``treadle.ControlVector``, or one of these and a
      strength. ``control_vector_layers``: the first and the last layer that they change.
    - ``mmproj``: the projector file, which turns pictures and sounds into rows. None: the one of a
      Hugging Face folder, or in the same folder as the model. False: none.
    - ``image_max_tokens``: maximum tokens of a picture, None for a default that suits a CPU.
    - ``media_urls``: whether pictures in messages may be http(s) addresses, or a list of the hosts
      that they may name. Only public hosts are asked.

    Defaults of answers, which settings of a call override:

    - ``sampling``: a ``Sampling``, or fields by name over those that the file recommends.
    - ``seed``: for every request.
    - ``max_tokens``: of an answer, None for the end of the context.
    - ``chat_template``: a file, the name of a built-in template or of another one in the model
      file, or a template's text. None: the model file's own.
    - ``chat_template_kwargs``: variables of the template.
    - ``reasoning``: "on", "off", or "auto" for the template's default. It sets the template's
      variable for reasoning; without such a variable, "off" is a reasoning budget of 0.
    - ``reasoning_budget``: maximum tokens of reasoning in an answer, None for no limit.
      ``reasoning_budget_message`` is written before the reasoning is ended.
    - ``reasoning_preserve``: whether the prompt keeps the reasoning of earlier answers, if the
      template has a variable for it. None: the template's default.
    - ``strict``: refuse pictures and sounds that the model cannot read. Otherwise they are left
      out: a sentence in the prompt says so, and a warning.

    Raises FileError, UnsupportedError, DeviceError, TemplateError, and TreadleError for settings
    out of range.
    """
    return Model(
        path,
        threads=threads,
        context=context,
        deterministic=deterministic,
        kv=kv,
        n_sequences=n_sequences,
        kv_bytes=kv_bytes,
        kv_tokens=kv_tokens,
        cache_dir=cache_dir,
        cache_bytes=cache_bytes,
        speculate=speculate,
        draft=draft,
        lora=lora,
        control_vectors=control_vectors,
        control_vector_layers=control_vector_layers,
        mmproj=mmproj,
        image_max_tokens=image_max_tokens,
        media_urls=media_urls,
        device=device,
        isa=isa,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        reasoning=reasoning,
        reasoning_budget=reasoning_budget,
        reasoning_budget_message=reasoning_budget_message,
        reasoning_preserve=reasoning_preserve,
        sampling=sampling,
        seed=seed,
        max_tokens=max_tokens,
        strict=strict,
        progress=progress,
    )


def load_session(path: str | os.PathLike[str], model: Model) -> Session:
    """Load a session of ``model`` from ``path``, a file of ``Session.save``; errors as of
    ``Model.load_session``.
    """
    if not isinstance(model, Model):
        raise TreadleError(f"model is {type(model).__name__}: expected a treadle.Model")
    return model.load_session(path)


class Model:
    """A loaded model; ``load`` makes it, from the same arguments. Use it as a context manager, or
    ``close`` it.
    """

    engine_type: ClassVar[type[Engine]] = Engine  # made by ``__init__``, as is the device
    device_type: ClassVar[Callable[..., Device]] = staticmethod(open_device)

    def __new__(cls, *_: Any, **given: Any) -> Model:
        """Return a new object, not yet initialised. Raises TypeError for a call with some of the
        arguments, as other libraries' classes are called.
        """
        if cls is Model and "progress" not in given:
            raise TypeError("Model() needs all settings: treadle.load(path) opens a model")
        return super().__new__(cls)

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        threads: int | None,
        context: int | None,
        deterministic: bool,
        kv: str,
        n_sequences: int,
        kv_bytes: int | None,
        kv_tokens: int | None,
        cache_dir: str | os.PathLike[str] | None,
        cache_bytes: int,
        speculate: bool | None,
        draft: str | os.PathLike[str] | None,
        lora: Adapters,
        control_vectors: ControlVectors,
        control_vector_layers: tuple[int, int] | None,
        mmproj: str | os.PathLike[str] | bool | None,
        image_max_tokens: int | None,
        media_urls: bool | Sequence[str],
        device: str,
        isa: str | None,
        progress: Progress | None,
        **defaults: Any,
    ) -> None:
        began = time.perf_counter()
        sizes = read_sizes(threads, context, kv_bytes, kv_tokens, n_sequences, cache_bytes)
        threads, context, kv_bytes, kv_tokens, n_sequences, cache_bytes = sizes
        check_choices(deterministic, speculate, draft, kv, isa)
        self.defaults = read_defaults(**defaults)
        # A download brings the projector too, unless none is wanted or it is here.
        wanted = mmproj if mmproj is None or isinstance(mmproj, bool) else False
        self.path = find_path(path, progress=progress, projector=wanted)
        guard_mappings()
        self.gguf = open_found(self.path, progress)
        self.config = open_config(self.gguf)
        refuse_drafter(self.config, self.path)
        if self.defaults.template is not None or self.defaults.reasoning_budget_message:
            self._check_template()
        # Defaults of calls.
        self.sampling = self.defaults.sampling_over(recommended(self.gguf.metadata))
        self.n_threads = threads or usable_threads()[0]
        self.n_ctx = choose_context(context, self.config, self.gguf, kv_tokens)
        if self.config.encoder is not None:
            from treadle.api.encoder_decoder import check_encoder_settings

            check_encoder_settings(
                self.config,
                lora=lora,
                control_vectors=control_vectors,
                cache_dir=cache_dir,
                draft=draft,
                mmproj=None if isinstance(mmproj, bool) else mmproj,
            )
            self.config = self.config.attending_to(self.n_ctx)
        self.engine = self.engine_type(
            self.gguf,
            self.config,
            self.device_type(device, isa, self.n_threads, progress),
            n_ctx=self.n_ctx,
            kv=kv,
            n_sequences=n_sequences,
            kv_bytes=kv_bytes,
            kv_tokens=kv_tokens,
            deterministic=deterministic,
        )
        with ExitStack() as failed:
            failed.callback(self.engine.close)
            if self.config.encoder is not None:
                from treadle.api.encoder_decoder import open_encoder

                open_encoder(self.engine)
            add_adapters(lora, self.engine)
            add_control_vectors(control_vectors, control_vector_layers, self.engine)
            if cache_dir is not None:
                from treadle.kvcache.disk.page_store import PageStore

                folder = file_name(cache_dir, "cache_dir")
                self.engine.cache.store = PageStore(self.engine, folder, cache_bytes)
            self.stepper = CooperativeStepper(Scheduler(self.engine))
            second = (
                None
                if draft is None
                else open_found(find_path(draft, "draft", progress), drafter=True)
            )
            self.speculate = self.stepper.scheduler.open_drafter(second, speculate)
            self._mmproj = mmproj
            self._progress = progress
            self.image_max_tokens = image_max_tokens
            self.media_urls = media_urls
            self._media: ModelMedia | None = None
            self._media_tried = False
            if mmproj not in (None, False):
                self._open_media()  # now, so that ``load`` raises its errors
            elif mmproj is None and self.config.arch.pictures:
                from treadle.api.projector_choice import say_no_projector

                say_no_projector(self.path, self.config)
            failed.pop_all()
        self.load_s = time.perf_counter() - began

    @property
    def isa(self) -> Isa:
        """The instruction set that kernels are compiled for."""
        return self.engine.device.isa

    def __repr__(self) -> str:
        from treadle.api.summary import one_line

        return one_line(self.path, self.engine)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Model cannot be pickled or copied: load it in each process")

    def _repr_html_(self) -> str:
        from treadle.api.summary import table

        return table(self.path, self.engine)

    @cached_property
    def grammars(self) -> Grammars:
        """Cache of compiled grammars, of those used recently."""
        from treadle.grammar.compiled_cache import Grammars

        return Grammars(self.tokenizer)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, built on first use."""
        from treadle.tokenizer.tokenizer import load_tokenizer

        try:
            tokenizer = load_tokenizer(self.gguf)
        finally:
            self.gguf.check()  # a damaged file's own error comes first
        tokenizer.warn_of_extra_tokens(self.config.n_vocab)
        return tokenizer

    @property
    def media(self) -> ModelMedia | None:
        """The model's projector of pictures and sounds, opened on first use; None without one."""
        if not self._media_tried:
            self._open_media()
        return self._media

    def _open_media(self) -> None:
        from treadle.api.projector_choice import open_found_media, open_model_media

        with self.engine.lock:
            given = self._mmproj
            if self._media_tried or given is False:
                return
            named = isinstance(given, str | os.PathLike)
            if self.engine.device.takes_media:
                path = file_name(given, "mmproj") if named else self.path  # type: ignore[arg-type]
                opened = open_model_media if named else open_found_media
                self._media = opened(
                    path,
                    self.engine,
                    lambda: self.tokenizer,
                    urls=self.media_urls,
                    max_rows=self.image_max_tokens,
                    progress=self._progress,
                )
            elif named or given is True:
                what = "pictures and sounds are read on this machine's CPU only"
                raise UnsupportedError(f"mmproj={given}: {what}")
            if self._media is None and given is True:
                what = "no projector file beside it fits: give mmproj= a path"
                raise TreadleError(f"{self.path}: {what}")
            self._media_tried = True

    @property
    def modalities(self) -> frozenset[str]:
        """The kinds of media that the model reads besides text: "image", "audio"."""
        return frozenset() if self.media is None else self.media.modalities

    @property
    def media_marks(self) -> tuple[MediaMarks, ...]:
        """The texts that stand for pictures and sounds in rendered prompts; () if it reads none."""
        return () if self.media is None else self.media.marks

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template: the one given to ``load``, else the file's, else the built-in one of
        the model's family.
        """
        self.gguf.check()
        template = self.defaults.load_template(self.gguf, self.config.arch.name)
        template.prepare()
        return template

    @property
    def _thought(self) -> Thought | None:
        """The marks around reasoning that the chat template writes; None without any."""
        from treadle.chat.tools import dialect_of

        return dialect_of(self.template).thought

    def _check_template(self) -> None:
        """Raise TemplateError if the chat template given to ``load`` is not in this file or refuses
        a plain message, GrammarError if ``reasoning_budget_message`` contains the template's
        reasoning marks.
        """
        from treadle.chat.template.override import check_plain
        from treadle.chat.tools.answer_plan import check_message

        with of_setting("chat_template"):
            if self.defaults.template is not None:
                check_plain(self.template)
        if self.defaults.reasoning_budget_message and (thought := self._thought):
            check_message(self.defaults.reasoning_budget_message, thought)

    @suggesting(keywords_elsewhere)
    def session(
        self,
        *,
        lora: Mapping[Any, float] | None = None,
        control_vectors: Mapping[Any, float] | None = None,
        source: str | Sequence[int] | None = None,
    ) -> Session:
        """Return a new session, which ``close`` frees; ``lora`` and ``control_vectors`` as in
        ``generate``. ``source``: for an encoder-decoder model, the text or ids that the encoder
        reads; the session's tokens are the decoder's, which begin with ``config.start_id``.
        """
        from treadle.api.session import Session  # requests have none of their own

        scales = adapter_scales(lora, control_vectors, self.engine)
        return Session(self.engine, scales, self._source_ids(source))

    def _source_ids(self, source: str | Sequence[int] | None) -> list[int]:
        """Return the token ids of ``source``, a text or ids, which the encoder of an
        encoder-decoder model reads; [] for None. Raises TreadleError for an empty text.
        """
        if source is None:
            return []
        if not (ids := self._read(source) if isinstance(source, str) else token_ids(source)):
            raise TreadleError("the source is empty: give at least one token")
        return ids

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """Load a session from a file of ``Session.save``, without recomputing any token.

        Raises FileError for a file that is damaged, of another model, or with keys and values of
        another type (``load(kv=...)``); ContextFullError if its tokens do not fit; UnsupportedError
        for an encoder-decoder model.
        """
        from treadle.kvcache.disk.session_file import load_session

        if self.config.encoder is not None:
            raise UnsupportedError(f"{path}: {self.config.arch.name} has no files of sessions")
        session = self.session(lora={}, control_vectors={})
        load_session(path, self.engine, session.seq, self.stepper.scheduler.make_room)
        return session

    # -- text -----------------------------------------------------------------------------------

    @suggesting(keywords_elsewhere)
    def tokenize(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """Return the token ids of a text. ``bos``: whether it begins with the BOS token, None as
        the file says; ``special``: names of control tokens in the text become those tokens.
        """
        if not isinstance(text, str):
            raise TreadleError(f"the text is {type(text).__name__}: expected a str")
        bos = None if bos is None else flag("bos", bos)
        return self.tokenizer.encode(text, bos=bos, special=flag("special", special))

    @suggesting(keywords_elsewhere)
    def detokenize(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of token ids. ``special``: write control tokens by their names, else
        leave them out.
        """
        try:
            return self.tokenizer.decode(token_ids(ids), special=flag("special", special))
        except IndexError as error:
            raise TreadleError(str(error)) from None

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Iterable[str] | None = (),
        grammar: str | None = None,
        json_schema: Schema | None = None,
        regex: str | None = None,
        session: Session | None = None,
        logprobs: int | None = None,
        constraint: TokenConstraint | None = None,
        lora: Mapping[Any, float] | None = None,
        control_vectors: Mapping[Any, float] | None = None,
        cache_prompt: bool = True,
        media: Sequence[Any] | None = None,
        **fields: Any,
    ) -> Generation:
        """Complete a prompt; return an iterator of pieces of text. In an encoder-decoder model, the
        encoder reads the prompt, and the decoder writes the text.

        ``max_tokens``: None for the default of ``load``, -1 for no limit; ``sampling``: None for
        the model's defaults; ``fields``: its fields by name, such as ``temperature=0``, which
        override it; ``stop``: a string or several, the output ends before the first that occurs;
        ``grammar``: GBNF text that the output must follow; ``json_schema``: a schema it must
        satisfy, as text, a dict or a pydantic class; ``regex``: a pattern that the whole output
        must match (Rust's syntax); ``constraint``: your own ``treadle.sampling.TokenConstraint``;
        ``session``: whose tokens and adapters to use; ``logprobs``: number of alternatives per
        token in ``Generation.logprobs``, 0 for the token alone; ``lora``: scales of adapters by
        name, in place of those of ``load``; ``control_vectors``: strengths of control vectors by
        name, in place of those of ``load``; ``cache_prompt``: False to recompute the whole prompt;
        ``media``: pictures and sounds, each a path, bytes, an image of Pillow's or an array, which
        stand where a text prompt has ``<__media__>``, or before it if it has none.

        Raises ContextFullError for a prompt longer than the context, GrammarError, SamplingError,
        TypeError for a name that is no setting, UnsupportedError for text if the file has no
        vocabulary.
        """
        request = self.build_request(
            prompt,
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            grammar=grammar,
            json_schema=json_schema,
            regex=regex,
            session=session,
            logprobs=logprobs,
            constraint=constraint,
            lora=lora,
            control_vectors=control_vectors,
            cache_prompt=cache_prompt,
            media=media,
            **fields,
        )
        return Generation(request, self.stepper)

    def build_request(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: str | Iterable[str] | None = (),
        grammar: str | None = None,
        json_schema: Schema | None = None,
        regex: str | None = None,
        session: Session | None = None,
        logprobs: int | None = None,
        constraint: TokenConstraint | None = None,
        lora: Mapping[Any, float] | None = None,
        control_vectors: Mapping[Any, float] | None = None,
        cache_prompt: bool = True,
        media: Sequence[Any] | None = None,
        plan: AnswerPlan | None = None,
        ends: frozenset[int] = frozenset(),
        keeps_stop: bool = False,
        lines: IndentStop | None = None,
        priority: int = 0,
        client: Hashable = None,
        look_ahead: float = inf,
        system_end: int = 0,
        **fields: Any,
    ) -> Request:
        """Return a request for ``stepper.scheduler``, not yet added to it. Other settings and
        errors are those of ``generate``.

        ``plan``: the plan of an answer with tools, reasoning or a schema; its constraint replaces
        ``constraint``. ``ends``, ``keeps_stop``, ``lines``: arguments of ``RequestOutput``;
        ``priority``, ``client``, ``look_ahead``, ``system_end``: of ``Request``.
        """
        check_session(session, self.engine)
        if media is not None and len(media):
            prompt = self._with_media(prompt, media)
        rows = prompt if isinstance(prompt, MediaPrompt) else None
        if not (ids := self._read(prompt) if isinstance(prompt, str) else token_ids(prompt)):
            raise TreadleError("the prompt is empty: give at least one token")
        if rows is None and max(ids) >= self.config.n_vocab:  # others' pictures have such ids
            raise TreadleError(f"a token id outside 0..{self.config.n_vocab - 1}")
        source: list[int] = []
        if self.config.encoder is not None:
            if session is not None:
                what = "a session has a prompt of its own (source=): feed it the text's tokens"
                raise UnsupportedError(f"{self.config.arch.name}: {what}")
            self.engine.cache.check_context(len(ids))
            source, ids = ids, [self.config.start_id]
        settings = build_sampling(sampling, self.sampling, fields, SETTINGS)
        if rows is not None and self.media is not None:  # answers may have no marks of pictures
            banned = dict.fromkeys(self.media.mark_ids, -inf)
            settings = replace(settings, logit_bias={**banned, **settings.logit_bias})
        limit = token_limit(self.defaults.max_tokens if max_tokens is None else max_tokens)
        n_top = alternatives(logprobs, self.config.n_vocab)
        tokenizer = output_tokenizer(self, stop := stop_strings(stop))
        rule = constraint if plan is None else plan.guide()
        if grammar is not None or json_schema is not None or regex is not None:
            rule = self.grammars.matcher(grammar, json_schema, regex, constraint)
        sampler = Sampler(
            settings,
            self.config.n_vocab,
            eog=tokenizer.eog,
            tokenizer=tokenizer.of_text,
            constraint=rule,
        )
        self.engine.cache.check_context(len(ids))
        answer = RequestOutput(
            tokenizer,
            ids,
            n_ctx=self.n_ctx,
            max_tokens=limit,
            stop=stop,
            stop_filter=None if plan is None else plan.stop_filter(stop),
            shown=() if plan is None else plan.shown,
            ends=ends,
            keeps_stop=keeps_stop,
            lines=lines,
        )
        answer.timings.load_s = self.load_s
        answer.timings.n_prompt = len(source or ids)
        if rows is not None:
            answer.media = rows.usage
        return Request(
            ids,
            sampler,
            answer,
            logprobs=n_top,
            session=session,
            priority=priority,
            client=client,
            look_ahead=look_ahead,
            speculate=self.speculate,
            lora=adapter_scales(lora, control_vectors, self.engine, session),
            reuse=flag("cache_prompt", cache_prompt),
            media=None if rows is None else rows.encoders,
            system_end=system_end,
            source=source,
        )

    def _with_media(self, prompt: str | Sequence[int], media: Sequence[Any]) -> MediaPrompt:
        """Return the token ids of a text prompt with the pictures and sounds ``media``. Raises
        TreadleError for a prompt of ids, UnsupportedError without a projector.
        """
        from treadle.api.media import pieces_of

        if not isinstance(prompt, str):
            raise TreadleError("media= needs a prompt that is text; in a chat, give messages parts")
        if self.media is None:
            what = "reads text only: it has no projector (mmproj=)"
            raise UnsupportedError(f"{self.path}: {what}")
        return self.media.raw_ids(pieces_of(prompt, media))

    def generate_many(
        self, prompts: Iterable[str | Sequence[int]], **settings: Any
    ) -> Iterator[Generation]:
        """Complete many prompts in shared batches; return an iterator of finished Generations, in
        the order of ``prompts``.

        ``settings``: those of ``generate`` except ``session`` and ``constraint``. As many prompts
        run at once as there are pages for; when one ends, the next joins. ``prompts`` is iterated
        on demand. Raises the errors of ``generate``, each at its prompt's place.
        """
        each = iterated("prompts", prompts)
        settings = shared(settings)
        self.generate([0], **settings)  # raises for invalid settings
        return in_order(self.generate(prompt, **settings) for prompt in each)

    @overload
    def chat(self, messages: Messages, *, tools: Sequence[Tool], **settings: Any) -> Reply: ...
    @overload
    def chat(self, messages: Messages, *, reasoning_budget: int, **settings: Any) -> Reply: ...
    @overload
    def chat(
        self, messages: Messages, *, continue_final_message: bool | str, **settings: Any
    ) -> Reply: ...
    @overload
    def chat(self, messages: Messages, *, tools: None = None, **settings: Any) -> Generation: ...

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Tool] | None = None,
        template: Mapping[str, Any] | None = None,
        reasoning: str | None = None,
        **settings: Any,
    ) -> Generation:
        """Answer a conversation: ``messages`` of ``{"role", "content"}``, each content a text or a
        list of parts ``{"type": "text", "text"}``. A final assistant message is continued.

        ``settings`` are those of ``generate``; any other must be a variable that the chat template
        uses, such as ``enable_thinking=False`` (else TypeError). ``template``: variables by name
        that the template may ignore. ``reasoning``: "on" or "off", in place of the default of
        ``load``.

        The answer is a ``Reply`` with any of these: ``tools``, functions or dicts as in OpenAI's
        API; ``reasoning_budget=`` tokens, -1 for no limit; ``continue_final_message=``, which is
        False if a final assistant message is complete, and "reasoning_content" if the answer
        continues its reasoning. Without a grammar, schema or constraint it is one also if reasoning
        is off, or if ``load`` got a reasoning budget.

        A picture or sound that the model cannot read is replaced by a sentence, with a warning;
        with ``load(strict=True)`` it raises UnsupportedError. Also raises TemplateError, and
        UnsupportedError for parts of other types.
        """
        own = {name: settings.pop(name) for name in SETTINGS if name in settings}
        stop = self.template.stop
        _ = self.tokenizer  # built while the template's process starts
        conversation = self.read_conversation(messages)
        own["stop"] = (*stop_strings(own.get("stop")), *stop)
        given = {**settings, **(template or {})}
        if reasoning is not None:
            from treadle.chat.template.variables import check_own, check_reasoning, switched

            reasoning = check_reasoning(reasoning)
            template = {**switched(self.template, reasoning), **check_own(template)}
        off = self.template.is_off(given, reasoning, settings.get("reasoning_budget"))
        ruled = any(own.get(name) is not None for name in RULES)
        if tools is not None or not ruled:
            if off:
                settings["reasoning_budget"] = 0
            elif self.defaults.reasoning_budget is not None and self._thought:
                settings.setdefault("reasoning_budget", self.defaults.reasoning_budget)
        if tools is not None or not settings.keys().isdisjoint(REPLY_SETTINGS):
            from treadle.api.tool_chat import reply

            message = self.defaults.reasoning_budget_message
            settings.setdefault("reasoning_budget_message", message)
            return reply(self, conversation, tools, own, SETTINGS, template=template, **settings)
        for warning in conversation.warnings:
            warn(warning)
        prompt = self._prompt(conversation, None, template, settings)
        ids = self.prompt_ids(prompt)

        def render(messages: list[dict[str, Any]]) -> str:
            beginning = replace(conversation, messages=messages, media=())
            return self._prompt(beginning, None, template, settings).text

        said = conversation.messages
        own["system_end"] = self.system_end(ids, said, render, (template, settings))
        return self.generate(ids, **own)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text that the chat template makes of the conversation ``messages``; ``tools``:
        in OpenAI's form, None for none; ``template`` and ``variables`` as in ``chat``.
        """
        conversation = self.read_conversation(messages)
        return self._prompt(conversation, tools, template, variables).shown

    def read_conversation(self, messages: Any) -> ChatMessages:
        """Return checked messages, by ``treadle.chat.messages.read_conversation``: media that this
        model does not read are refused or replaced.
        """
        from treadle.chat.messages import MediaPolicy, may_have_media, read_conversation

        kinds = self.modalities if may_have_media(messages) else frozenset()
        return read_conversation(messages, MediaPolicy(kinds, self.defaults.strict))

    def _prompt(
        self,
        conversation: ChatMessages,
        tools: list[dict[str, Any]] | None,
        template: Mapping[str, Any] | None,
        variables: Mapping[str, Any],
    ) -> ChatPrompt:
        """Render a conversation with the chat template; ``tools``: in OpenAI's form, None for none;
        ``template`` and ``variables`` as in ``chat``.
        """
        from treadle.chat.prompt import conversation_prompt

        marks = self.media_marks if conversation.media else ()
        return conversation_prompt(
            self.template, conversation, tools, template, variables, SETTINGS, marks=marks
        )

    def prompt_ids(self, prompt: ChatPrompt, *, bounded: bool = True) -> list[int]:
        """Return the token ids of a rendered prompt; its pictures and sounds are resized, but not
        encoded. ``bounded``: raise ContextFullError if their rows alone exceed the context.
        """
        if prompt.media is None or self.media is None:
            return self.tokenizer.encode_prompt(prompt.text)
        return self.media.chat_ids(prompt, bounded=bounded)

    def system_end(
        self,
        ids: Sequence[int],
        messages: list[dict[str, Any]],
        render: Callable[[list[dict[str, Any]]], str],
        given: Any,
    ) -> int:
        """Return how many of a prompt's ``ids`` are its system prompt, if the model's layers keep a
        state that is worth storing there, else 0. ``render`` returns the prompt of messages;
        ``given``: all other inputs of the template, by which results are cached
        (``treadle.chat.system_prefix``).
        """
        if not self.engine.cache.states or len(ids) <= MIN_SAVING_AT_BRANCH:
            return 0
        return self._system_prefixes.end(ids, messages, render, given)

    @cached_property
    def _system_prefixes(self) -> SystemPrefixes:
        """Cache of the token ids of recent system prompts."""
        from treadle.chat.system_prefix import SystemPrefixes

        return SystemPrefixes(self.tokenizer.encode_prompt)

    # -- logits, states, vectors and scores --------------------------------------------------------

    def logits(
        self, ids: Sequence[int], *, source: str | Sequence[int] | None = None
    ) -> np.ndarray:
        """Return the logits after each id, float32 ``[n_tokens, n_vocab]``. ``source``: for an
        encoder-decoder model, the text or ids that the encoder reads; ``ids`` are then the
        decoder's. Raises ContextFullError.
        """
        ids = token_ids(ids)
        with self.engine.lock:
            self.make_room(len(ids))
            with self.session(source=source) as session:
                return session.logits(ids)

    def states(
        self, ids: Sequence[int], *, layers: Sequence[int] | str | None = None
    ) -> np.ndarray:
        """Return the last layer's normed states, float32 ``[n_tokens, n_embd]``, of the text
        ``ids``.

        With ``layers`` (not None), return the states between layers (the residual stream, not
        normed), ``[n_layers, n_tokens, n_embd]``: number 0 is before the first layer, number 5
        after five layers (``hidden_states[5]`` of transformers), -1 after the last one, "all" for
        every number. Raises ContextFullError, UnsupportedError.
        """
        if layers is not None:
            from treadle.api.hooks import layer_states

            return layer_states(self, ids, layers)
        ids = token_ids(ids)
        with self.engine.lock:
            self.make_room(len(ids))
            return self.engine.states(ids)

    @suggesting(keywords_elsewhere)
    def embed(
        self,
        texts: str | Sequence[str | Sequence[int]],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        default_prompt: bool = True,
        truncate: bool = False,
    ) -> np.ndarray:
        """Return a vector for each text or list of ids, float32 ``[n_texts, dimensions]``.
        ``normalize``: scale vectors to length 1; ``dimensions``: keep so many values, None for all;
        ``default_prompt``: prepend the file's prompt, if it has one; ``truncate``: cut texts that
        are too long.

        Raises TreadleError for ``dimensions`` out of range, ContextFullError.
        """
        from treadle.api.embedding import Embedder

        embedder = Embedder(self, normalize, dimensions, default_prompt=default_prompt)
        if embedder.note:
            warnings.warn(embedder.note, stacklevel=2)
        return embedder.embed(texts, truncate=truncate)

    @suggesting(keywords_elsewhere)
    def rerank(self, query: str, documents: Sequence[str], *, truncate: bool = False) -> np.ndarray:
        """Return a relevance score of each document for ``query``, float32 ``[n_documents]``;
        larger is better. ``truncate``: cut documents that are too long, else ContextFullError is
        raised. Raises UnsupportedError for a model that is not a reranker.
        """
        from treadle.api.rerank import Reranker

        reranker = Reranker(self)
        given = listed("documents", documents)
        return reranker.scores(query, given, truncate=truncate)

    # -- hooks ---------------------------------------------------------------------------------

    @cached_property
    def hooks(self) -> EngineHooks:
        """The hooks that traces and patches of this model install in its engine."""
        from treadle.engine.hooks import EngineHooks

        return EngineHooks(self.engine)

    def trace(self, *labels: str) -> Trace:
        """Return a context manager that collects what steps write, in every run of the model while
        it is entered, other threads' included::

            with model.trace("L5.ffn.down", "L*.attn") as t:
                model.generate("Once upon a time", max_tokens=8).finish()
            t["L5.ffn.down"].values  # float32 [n_tokens, n_embd]

        ``labels``: those of the plan's steps (``treadle plan``), with ``*`` for any characters;
        "L5" for the states after layer 5 (layers count from 0). ``t[label]`` is a ``StepValues`` of
        all runs: values with named axes, and each row's token, position and sequence; ``t.runs``
        has each run by itself.

        Texts that begin beside a trace use no cached prefix, so all of their tokens have rows;
        tokens that a session holds already have none, and neither has the token that reaches
        ``max_tokens``, which no run reads. Rows of rejected drafts are in ``t.runs`` alone. Raises
        TreadleError for a label that no step has, UnsupportedError with ``distributed`` models.
        """
        from treadle.api.hooks import Trace

        return Trace(self.hooks, labels)

    def patch(self, functions: Mapping[str, PatchFunction]) -> AbstractContextManager[None]:
        """Return a context manager that changes what steps write, in every run of the model while
        it is entered, other threads' included::

            def without_head_3(values):
                values[:, 3] = 0

            with model.patch({"L5.attn": without_head_3}):
                print(model.generate("Once upon a time", max_tokens=8).finish())

        ``functions``: by label, as in ``trace``. Each is called after its step in every run, with
        the values, float32, a row for each token, and a ``StepValues`` if it has a second parameter
        without a default. It changes them in place, or returns others of the same shape. They are
        written back in the step's own type, which may round them to 8 bits.

        Patched keys and values are never reused: texts that begin beside a patch use no cached
        prefix, and no later text uses theirs. A session keeps the patched tokens that it holds.
        Raises TreadleError for a label that no step has, and in the run for a result of another
        shape; a function's own errors end the run, as if it had not begun.
        """
        from treadle.api.hooks import patched

        return patched(self.hooks, functions)

    def attention(self, ids: Sequence[int], layer: int) -> AttentionWeights:
        """Return the attention weights of a layer over the text ``ids``, float32 ``[n_head,
        n_tokens, n_tokens]``, by head, query and key; negative layers count from the end. They are
        computed from the queries, and from the keys as the cache stores them (``load(kv=...)``).
        Raises ContextFullError, UnsupportedError for a layer without attention.
        """
        from treadle.api.hooks import attention

        return attention(self, ids, layer)

    def lens(
        self,
        ids: Sequence[int],
        *,
        layers: Sequence[int] | str | None = None,
        positions: Sequence[int] | None = None,
    ) -> LensLogits:
        """Return a logit lens: the logits that the states between layers give with the model's last
        norm and output matrix, float32 ``[n_layers, n_tokens, n_vocab]``.

        ``layers``: as in ``states``, None for all; ``positions``: indices in ``ids``, such as [-1]
        for the last token, None for all. Raises ContextFullError, UnsupportedError.
        """
        from treadle.api.hooks import lens

        return lens(self, ids, layers, positions)

    def _read(self, text: str) -> list[int]:
        if not (ids := self.tokenize(text)):
            raise TreadleError(
                "the text is empty and this model has no BOS token: give at least one character"
            )
        return ids

    def make_room(self, n_tokens: int) -> None:
        """Preempt running requests until ``n_tokens`` fit into the KV cache. The caller holds the
        engine's lock.
        """
        self.stepper.scheduler.make_room(n_tokens)

    def _with_room(self, n_tokens: int, runs: Generator[T, None, None]) -> Generator[T, None, None]:
        """Make room for ``n_tokens`` in the KV cache, then yield from ``runs``, engine runs. Other
        threads may use the engine between runs. The caller must close the generator.
        """
        with closing(runs):
            with self.engine.lock:
                self.make_room(n_tokens)
                first = next(runs)
            yield first
            yield from runs

    def plan(self, n_tokens: int = 1, n_outputs: int = 1) -> Plan:
        """Return the plan for a batch of ``n_tokens``, which computes the logits of ``n_outputs``
        of them.
        """
        self.gguf.check()
        n_tokens = ranged("n_tokens", n_tokens, 1, self.engine.max_tokens)
        return self.engine.plan(n_tokens, ranged("n_outputs", n_outputs, 0, min(n_tokens, OUTPUTS)))

    def profile(self, n_tokens: int = 1, depth: int = 0) -> list[tuple[str, float]]:
        """Return (label, seconds) of each step of the plan, for one run of ``n_tokens`` after
        ``depth`` cached tokens.
        """
        n_tokens = ranged("n_tokens", n_tokens, 1, self.engine.max_tokens)
        depth = ranged("depth", depth, 0)
        with self.engine.lock:
            self.make_room(depth + n_tokens)
            with self.session() as session:
                if depth:
                    session.feed([0] * depth)
                return self.engine.run_timed([BatchItem(session.seq, [0] * n_tokens)])

    def close(self) -> None:
        """Stop the threads and close the file."""
        with self.gguf, suppress(ForkedError), self.engine.lock:  # another thread may be in a step
            self.stepper.scheduler.close_drafter()
            if self._media is not None:
                self._media.close()
            self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# settings of ``chat`` for which the answer is a ``Reply``
REPLY_SETTINGS = frozenset(("reasoning_budget", "continue_final_message"))
# parameters of ``generate``, by name
SETTINGS = (*(Model.generate.__kwdefaults__ or ()), *SAMPLING_FIELDS)
