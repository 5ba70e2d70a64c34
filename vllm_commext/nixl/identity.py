"""Identity of what computes an engine's KV cache beside the tokens: the files of its weights, their
generation, and each LoRA adapter by name and content.

Nothing counts that differs between hosts without a meaning, such as an adapter's path.  What is not
known for sure is equal to nothing: the other engine computes the prompt.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.wire.prompt import Prompt

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = tuple(f"adapter_model.{end}" for end in ("safetensors", "bin", "pt"))
"""vLLM reads the first of them that is there."""
_NOT_THE_ADAPTER = frozenset({"base_model_name_or_path", "revision"})
DIGEST_SECONDS = 10.0
"""Wait for an adapter's digest after its load.  The workers read the same files meanwhile."""
MAX_ADAPTERS = 1 << 14
_WEIGHT_FILES = (
    *("consolidated*.safetensors", "model*.safetensors", "*.safetensors"),
    *("pytorch_model*.bin", "*.bin", "*.pt"),
)
"""vLLM reads those of the first kind that is there: others need not be on each host."""
NUM_SAMPLES, SAMPLE_BYTES = 1 << 12, 1 << 12  # of all weight files together, and of each
SAMPLE_READERS = 32  # samples that are read at a time, as network file systems take long for each
WEIGHTS_SECONDS = 60.0
RELOAD = "reload_weights"
FIRST_VERSION = "default"  # vLLM's label of the weights that an engine starts with
Stats = tuple[tuple[str, int, int, int], ...]


def stats_of(folder: Path, names: Iterable[str]) -> Stats:
    """Name, bytes, and nanoseconds of the last change of content and of anything, of each file."""
    found = ((name, folder / name) for name in names)
    stats = ((name, path.stat()) for name, path in found if path.is_file())
    return tuple((name, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for name, one in stats)


def digest_of_adapter(folder: Path) -> str:
    """SHA-256 of an adapter's configuration and weights, hexadecimal.

    Raises:
        OSError, ValueError: they cannot be read, or the configuration is no JSON object.
    """
    config = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=dict[str, Any])
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_ADAPTER}
    found = hashlib.sha256(json.dumps(kept, sort_keys=True).encode())
    weights = next((name for name in ADAPTER_WEIGHTS if (folder / name).is_file()), None)
    if weights is None:
        raise FileNotFoundError(f"expected {ADAPTER_WEIGHTS[0]} in {folder}")
    with (folder / weights).open("rb") as file:
        found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def digest_of_weights(place: Path) -> str:
    """SHA-256, hexadecimal, of the sizes and of evenly spaced samples of a model's weight files,
    wherever they are; "" where there is none. Raises OSError, also where it takes too long."""
    kinds = ([place],) if place.is_file() else (sorted(place.glob(one)) for one in _WEIGHT_FILES)
    files, samples = next(filter(None, kinds), []), list[tuple[int, int]]()
    found, pool = hashlib.sha256(), ThreadPoolExecutor(SAMPLE_READERS)
    with ExitStack() as stack:
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for path in files:
            file = stack.enter_context(path.open("rb", buffering=0)).fileno()
            size = os.fstat(file).st_size
            found.update(size.to_bytes(8, "little"))
            step = max(SAMPLE_BYTES, size * len(files) // NUM_SAMPLES)
            samples += [(file, begin) for begin in range(0, size, step)]

        def read(sample: tuple[int, int]) -> bytes:
            return os.pread(sample[0], SAMPLE_BYTES, sample[1])

        for content in pool.map(read, samples, timeout=WEIGHTS_SECONDS):
            found.update(content)
    return found.hexdigest() if files else ""


def snapshot_of(repository: str, revision: str | None = None, folder: str | None = None) -> Path:
    """Find the folder that a hub's repository was downloaded to; raises OSError, ValueError."""
    from huggingface_hub import snapshot_download

    options: Any = {"revision": revision, "cache_dir": folder, "local_files_only": True}
    return Path(snapshot_download(repository, **options))


class _Adapter:
    """An adapter as the workers have loaded it, or are about to."""

    def __init__(self, lora: LoRARequest) -> None:
        self.name, self.path = lora.lora_name, lora.lora_path
        self._folder = Path(self.path).expanduser()
        self._stats: Stats = ()
        self._digest = self._error = ""
        self._is_loaded = False
        self._reading: threading.Thread | None = None
        if self._folder.is_dir():  # else a repository, which the workers fetch
            self._begin()

    def _begin(self) -> None:
        self._stats = self._stats_now()
        self._reading = threading.Thread(target=self._read, name="commext-adapter", daemon=True)
        self._reading.start()

    def _read(self) -> None:
        try:
            if not self._stats:
                self._folder = snapshot_of(self.path)
                self._stats = self._stats_now()
            self._digest = digest_of_adapter(self._folder)
        except Exception as error:  # noqa: BLE001 whatever it is, the content is not known
            self._error = f"its files cannot be read ({error})"

    def note_loaded(self, seconds: float) -> None:
        if self._reading is None:
            self._begin()
        assert self._reading is not None
        self._reading.join(seconds)
        self._is_loaded = True

    def _stats_now(self) -> Stats:
        return stats_of(self._folder, (ADAPTER_CONFIG, *ADAPTER_WEIGHTS))

    def digest_for(self, lora: LoRARequest) -> str:
        """The digest of what the workers compute a request with; raises UnsupportedError."""
        if not self._is_loaded:
            raise UnsupportedError("its load has failed, or goes on")
        if lora.load_inplace or (lora.lora_name, lora.lora_path) != (self.name, self.path):
            raise UnsupportedError("another one has taken its place")
        # Files that have gone cannot be loaded again: the workers have what was loaded.
        if self._stats_now() not in ((), self._stats):
            raise UnsupportedError("its files have changed since it was loaded: load it again")
        if not self._digest:
            raise UnsupportedError(self._error or "its files are still being read")
        return self._digest


class Adapters:
    """LoRA adapters of one engine, by their number there.

    Attributes: ``is_told``: the engine tells of each load; else no content is known.
    """

    def __init__(self, settings: str = "") -> None:
        self.is_told = False
        self._settings = settings
        self._loaded: OrderedDict[int, _Adapter] = OrderedDict()
        self._log = RateLimitedLog()

    def begin_load(self, lora: LoRARequest) -> Callable[[], None] | None:
        """The workers are about to load an adapter; returns what to call when they have.  None
        where they keep what they have."""
        if lora.lora_int_id in self._loaded and not lora.load_inplace:
            return None
        loaded = self._loaded[lora.lora_int_id] = _Adapter(lora)
        if len(self._loaded) > MAX_ADAPTERS:
            self._loaded.popitem(last=False)
        return lambda: loaded.note_loaded(DIGEST_SECONDS)

    def identity_of(self, lora: LoRARequest) -> str:
        """Name, content and settings; equal to no other where the content is not known."""
        try:
            digest = self._find(lora).digest_for(lora)
        except (UnsupportedError, OSError) as error:
            self._log.warning(
                f"adapter {lora.lora_name}",
                f"LoRA adapter {lora.lora_name!r} at {lora.lora_path}: its content is not known, "
                f"so prompts are computed at both engines: {error}",
            )
            digest = uuid.uuid4().hex
        return repr(
            (lora.lora_name, digest, getattr(lora, "is_3d_lora_weight", False), self._settings)
        )

    def _find(self, lora: LoRARequest) -> _Adapter:
        if not self.is_told:
            raise UnsupportedError("this vLLM does not tell when it loads adapters")
        if lora.lora_int_id not in self._loaded:  # the workers load it with this request
            self.begin_load(lora)
            self._loaded[lora.lora_int_id].note_loaded(0.0)
        return self._loaded[lora.lora_int_id]


class Identity:
    """One engine's weights and adapters. files: a digest of what its weights were loaded from, ""
    for no files; None where other engines may have other ones, by the user's word."""

    def __init__(self, adapter_settings: str = "", files: str | None = "") -> None:
        self.adapters = Adapters(adapter_settings)
        self.files = files
        self._weights = ""
        self._version = FIRST_VERSION

    def prompt_of(self, request: Request) -> Prompt:
        lora = request.lora_request
        places = [(item.identifier, item.mm_position) for item in request.mm_features]
        return Prompt(
            num_tokens=request.num_prompt_tokens,
            token_ids=request.prompt_token_ids,
            embeddings=request.prompt_embeds,
            is_token=getattr(request, "prompt_is_token_ids", None),  # vLLM before it mixed the two
            lora="" if lora is None else self.adapters.identity_of(lora),
            cache_salt=request.cache_salt or "",
            items=tuple((name, place.offset, place.length) for name, place in places),
            weights=self._weights,
            files=self.files or "",
        )

    def mark_of(self, request: Request) -> int:
        """64 bits, not 0, of the adapter and weights that compute a request."""
        prompt = self.prompt_of(request)
        parts = prompt.lora, prompt.weights, prompt.files
        return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:16], 16) or 1

    def begin_new_weights(
        self, method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Callable[[], None]:
        """The workers are about to change their weights by a method; returns what to call when they
        have.  A generation follows from the one before it and from the method, or from the files of
        a checkpoint that takes the place of all weights."""
        name = method if isinstance(method, str) else getattr(method, "__qualname__", "function")
        self._weights = hashlib.sha256(f"{self._weights}\0{name}".encode()).hexdigest()
        before = _checkpoint_of(method, args, kwargs)

        def settle() -> None:
            if before and before == _checkpoint_of(method, args, kwargs):
                self._weights = before

        return settle

    def note_version(self, version: str) -> None:
        """Take over vLLM's label of the weights: with it a restarted engine equals the others."""
        if version != self._version:
            self._version, self._weights = version, f"version {version}"


def _checkpoint_of(method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    iterator, path = [*args, None, None][:2]
    path = kwargs.get("weights_path", path)
    if method != RELOAD or not isinstance(path, str) or kwargs.get("weights_iterator", iterator):
        return ""
    folder = Path(path)
    if not folder.is_dir():
        return ""
    stats = stats_of(folder, sorted(one.name for one in folder.iterdir()))
    return repr([(name, num_bytes, changed) for name, num_bytes, changed, _ in stats])
