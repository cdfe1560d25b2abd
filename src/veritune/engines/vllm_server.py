"""vLLM as servers: prompts are shared among them, weights reach them through a folder or over NCCL.

A server that dies, stalls or restarts is dropped, its prompts go to the others, and it is taken back once it serves
the current weights. Each load has a label of its own which vLLM attaches to every completion, so what a restarted
server samples from its first weights is recognised and thrown away.
"""

from __future__ import annotations

import copy
import itertools
import math
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from veritune.core.errors import EngineError
from veritune.core.http import Endpoint, EndpointError, require_type
from veritune.core.types import Completion, Sampling, require_lengths
from veritune.engines.server_process import ServerProcess, WeightsFolder, free_port
from veritune.engines.shared_prompts import Claim, SharedPrompts
from veritune.engines.vllm_fields import as_completion, sampling_fields
from veritune.engines.vllm_settings import VLLMServerSettings
from veritune.engines.weight_check import SAMPLING, canary_prompt, require_served
from veritune.model.policy import Policy

HEALTH_SECONDS = 30.0
"""A server that does not answer its health check for so long, twice in a row, is stalled."""
PAUSE_SECONDS = 2.0
"""Between two looks at a server."""

VLLM = "vLLM 0.32 and later"

OpenTransfer = Callable[[str, torch.nn.Module, int, int], Callable[[], None]]
"""(url, model, free port, the server's GPUs) to a function that sends the model's weights; see engines.vllm."""


@dataclass(eq=False)
class _Server:
    endpoint: Endpoint
    process: ServerProcess | None = None
    """The process, where it is ours."""
    ready: bool = False
    """Whether it is proved to serve the current weights and nothing has gone wrong since."""
    life: int = 0
    """Counts how often it was taken in, so that a request of an earlier life cannot drop it."""
    error: str = "not reached yet"
    send: Callable[[], None] | None = None
    """Sends the trainer's weights over NCCL, once the two sides have met."""
    loading: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return self.endpoint.url

    def is_healthy(self, seconds: float) -> bool:
        """Whether it answers its health check in time."""
        try:
            self.endpoint.get("/health", seconds=min(HEALTH_SECONDS, seconds))
        except EndpointError:
            return False
        return True


class VLLMServerEngine:
    """Serves `policy` from the servers of `settings`; all of them are given its weights before this returns."""

    def __init__(
        self, policy: Policy, settings: VLLMServerSettings, *, open_transfer: OpenTransfer | None = None
    ) -> None:
        self.policy, self.settings, self.open_transfer = policy, settings, open_transfer
        self.longest = min(settings.max_model_len or policy.context_length, policy.context_length)
        self.weights_version = 0
        self.label = ""
        self._identity = uuid.uuid4().hex[:12]
        self._loads = itertools.count()
        self._trainer = threading.Lock()  # held by whichever thread reads the trainer's model
        self._closed = False
        self.servers = [_Server(Endpoint(url.rstrip("/").removesuffix("/v1"))) for url in settings.url]
        self._weights_folder = WeightsFolder(settings.weights_folder)
        self.folder = self._weights_folder.path
        try:
            self._start_servers()
            self._wait_for_servers()
            self.load_weights(policy.model, 0)
        except BaseException:
            self.close()
            raise

    # --- Starting and stopping

    def _start_servers(self) -> None:
        if not self.settings.start:
            return
        start_folder = self.folder / "start"
        save_for_servers(self.policy, start_folder, untied=self._untied())
        for index, device in enumerate(self.settings.start):
            port = free_port()
            arguments, environment = server_command(
                start_folder, device, port, self._dtype(), self.policy.context_length, self.settings
            )
            if self.open_transfer:
                arguments += ["--weight-transfer-config", '{"backend": "nccl"}']
            process = ServerProcess(arguments, environment, self.folder / f"server-{index}.log")
            self.servers.append(_Server(Endpoint(f"http://127.0.0.1:{port}"), process))

    def _dtype(self) -> str:
        own = str(next(self.policy.model.parameters()).dtype).removeprefix("torch.")
        return own if self.settings.dtype == "auto" else self.settings.dtype

    def _untied(self) -> bool:
        return "cpu" in self.settings.start

    def _wait_for_servers(self) -> None:
        deadline = time.monotonic() + self.settings.seconds
        for server in self.servers:
            while not server.is_healthy(deadline - time.monotonic()):
                if server.process is not None and not server.process.is_running():
                    raise EngineError(f"the vLLM server on {server} ended:\n{server.process.last_words()}")
                if time.monotonic() > deadline or server.process is None:
                    raise EngineError(f"no vLLM server answers at {server} (engine.url, engine.start)")
                time.sleep(0.5)

    def close(self) -> None:
        """Stop the servers that this engine started and remove its folder; servers given by address run on."""
        if self._closed:
            return
        self._closed = True
        for server in self.servers:
            server.ready = False
            server.endpoint.hang_up()
            if server.process is not None:
                server.process.stop()
        self._weights_folder.close()

    # --- Weights

    def load_weights(self, model: torch.nn.Module, version: int) -> None:
        """Have every server that can be reached serve `model` as `version`, each proved by the canary.

        A server that cannot be reached is dropped until it can; EngineError where none is left.
        """
        if self._closed:
            raise EngineError("this engine is closed")
        served = self.policy.model.config.vocab_size
        if model.config.vocab_size != served:  # type: ignore[union-attr]
            raise EngineError(
                f"cannot load a model with {model.config.vocab_size} ids into an engine of {served}"  # type: ignore[union-attr]
            )
        self.model, self.weights_version = model, version
        previous, self.label = self.label, f"{self._identity}-{next(self._loads)}"
        if self.open_transfer is None:
            save_for_servers(replace(self.policy, model=model), self.folder / self.label, untied=self._untied())
        with ThreadPoolExecutor(max(1, len(self.servers))) as pool:
            loads = [pool.submit(self._take_in, server, lambda: True) for server in self.servers]
        if previous:
            shutil.rmtree(self.folder / previous, ignore_errors=True)
        for load in loads:
            if (failure := load.exception()) is not None and not isinstance(failure, EndpointError):
                raise failure
        if not any(server.ready for server in self.servers):
            raise EngineError(f"no vLLM server could be given weights version {version}: {self._errors()}")

    def _take_in(self, server: _Server, wanted: Callable[[], bool]) -> None:
        """Give `server` the current weights, prove that it serves them, and let it have prompts.

        Stops where it is not `wanted` any more: the trainer's model may be changing by then.
        """
        # Whoever holds it may be waiting for a health check, for a batch that is over by now.
        if not server.loading.acquire(timeout=2 * HEALTH_SECONDS):
            raise EndpointError(f"{server} is still busy with an earlier load")
        try:
            require_wanted(server, wanted)  # the load that was waited for may have taken it in already
            server.ready = False
            if server.process is not None and not server.process.is_running():
                server.process.start()  # it will be healthy, and be taken in, later
            server.endpoint.get("/health", seconds=HEALTH_SECONDS)
            require_wanted(server, wanted)
            self._give_weights(server, wanted)
            prompt = canary_prompt(self.policy.model.config.vocab_size)
            completions = self._complete(server, prompt, SAMPLING, 0)
            with self._trainer:
                require_wanted(server, wanted)
                require_served(self.model, completions, self.weights_version, self.settings.dtype)
            server.life += 1
            server.ready = True
        except EndpointError as error:
            server.error = str(error)
            raise
        except EngineError as error:
            raise EngineError(f"{server}: {error}") from error
        finally:
            server.loading.release()

    def _give_weights(self, server: _Server, wanted: Callable[[], bool]) -> None:
        # Requests that were given up may still run there; their blocks would keep the old weights' cache alive.
        self._control(server, "/abort_requests", {})
        if self.open_transfer is not None:
            with self._trainer:
                require_wanted(server, wanted)
                self._send(server, self.open_transfer)
        else:
            folder = str((self.folder / self.label).absolute())
            self._control(server, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        deadline = time.monotonic() + HEALTH_SECONDS
        while not self._control(server, "/reset_prefix_cache", {}):
            if time.monotonic() > deadline:
                raise EndpointError(f"{server} keeps its prefix cache, which holds what the old weights computed")
            time.sleep(0.2)
        self._control(server, "/update_weight_version", {"new_version": self.label})

    def _send(self, server: _Server, open_transfer: OpenTransfer) -> None:
        answer = server.endpoint.get("/get_world_size", seconds=self.settings.seconds)
        with server.endpoint.reading(VLLM):
            gpus = require_type(answer["world_size"], int)
        try:
            server.send = server.send or open_transfer(server.endpoint.address, self.model, free_port(), gpus)
            server.send()
        except Exception as error:  # whatever vLLM's client and NCCL raise
            raise EndpointError(f"{server} could not be sent weights: {type(error).__name__}: {error}") from error

    def _control(self, server: _Server, path: str, payload: dict[str, Any]) -> bool:
        """Command `server`; whether it says that it succeeded, which not every command says."""
        try:
            answer = server.endpoint.post(path, payload, seconds=self.settings.seconds)
            with server.endpoint.reading(VLLM):
                return bool((answer or {}).get("success"))
        except EndpointError as error:
            if error.status == 404:
                raise EngineError(
                    f"{server} has no {path}: start it with VLLM_SERVER_DEV_MODE=1, on a trusted network only"
                ) from error
            raise

    # --- Completions

    def generate(self, prompts_ids: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """P prompts to P lists of `sampling.n` completions, whichever servers are there; the seed decides them all."""
        if self._closed:
            raise EngineError("this engine is closed")
        require_lengths(prompts_ids, self.longest)
        batch = SharedPrompts(prompts_ids, sampling)
        for server in self.servers:
            threading.Thread(target=self._watch, args=(server, batch), daemon=True).start()
        served = time.monotonic()
        while not batch.wait_over(PAUSE_SECONDS):
            if any(server.ready for server in self.servers):
                served = time.monotonic()
            elif time.monotonic() - served > self.settings.seconds:
                batch.fail(EngineError(f"every vLLM server is lost: {self._errors()}"))
        if batch.failure is not None:
            for server in self.servers:
                server.endpoint.hang_up()
        with self._trainer:  # from here on no thread reads the trainer's model: the batch is over
            return batch.collect()

    def _errors(self) -> str:
        return "; ".join(f"{server}: {server.error}" for server in self.servers)

    def _watch(self, server: _Server, batch: SharedPrompts) -> None:
        """Keep `server` at work on `batch`: workers while it is ready, ways back in while it is not."""
        working_life, missed = -1, 0
        while not batch.over:
            try:
                if not server.ready:
                    self._take_in(server, lambda: not batch.over)
                if working_life != server.life:
                    working_life, missed = server.life, 0
                    ready = max(1, sum(other.ready for other in self.servers))
                    for _ in range(min(self.settings.concurrency, math.ceil(len(batch.prompts) / ready))):
                        threading.Thread(target=self._work, args=(server, batch, server.life), daemon=True).start()
                missed = 0 if server.is_healthy(HEALTH_SECONDS) else missed + 1
                if missed == 2:
                    self._drop(server, batch, working_life, "does not answer its health check")
            except EndpointError:
                pass  # noted in server.error; it is tried again
            except Exception as error:  # whatever it is, the caller waits for it
                batch.fail(error)
            batch.wait_over(PAUSE_SECONDS)

    def _work(self, server: _Server, batch: SharedPrompts, life: int) -> None:
        while (claim := batch.claim(server, lambda: server.ready and server.life == life)) is not None:
            try:
                group = self._complete(server, batch.prompts[claim.index], batch.sampling, claim.index)
            except EndpointError as error:
                if error.is_refusal:
                    batch.fail(error)
                self._drop(server, batch, life, str(error), claim)
            except Exception as error:  # whatever it is, the caller waits for it
                batch.fail(error)
            else:
                batch.deliver(claim, group)

    def _drop(self, server: _Server, batch: SharedPrompts, life: int, reason: str, claim: Claim | None = None) -> None:
        """Take its prompts from `server`, unless that has been done since it was taken in as this `life`.

        `claim` is the one whose request failed.
        """
        if server.life == life and server.ready:
            server.ready = False
            server.error = reason
            server.send = None
            batch.give_back(server, reason, claim)
            server.endpoint.hang_up()

    def _complete(
        self, server: _Server, prompt: Sequence[int], sampling: Sampling, prompt_index: int
    ) -> list[Completion]:
        fields = sampling_fields(sampling, self.policy.eos_ids, prompt_index)
        answer = server.endpoint.post(
            "/inference/v1/generate",
            {"token_ids": list(prompt), "sampling_params": fields},
            seconds=self.settings.seconds,
            tokens=sampling.n * sampling.max_tokens,
        )
        with server.endpoint.reading(VLLM):
            choices = sorted(answer["choices"], key=lambda choice: require_type(choice["index"], int))
            if [choice["index"] for choice in choices] != list(range(sampling.n)):
                raise EngineError(f"{len(choices)} choices with other numbers than 0 to {sampling.n - 1}")
            return [self._completion(choice, prompt, sampling) for choice in choices]

    def _completion(self, choice: Any, prompt: Sequence[int], sampling: Sampling) -> Completion:
        versions = {span["version"] for span in choice["weight_versions"] or [{"version": None}]}
        if versions != {self.label} or choice["finish_reason"] == "abort":
            raise EngineError(f"weights {versions} instead of {self.label}, or stopped early")
        return as_completion(
            self.policy.tokenizer,
            self.policy.model.config.vocab_size,
            sampling,
            prompt,
            choice["token_ids"],
            [step["logprob"] for step in choice["logprobs"]["content"]],
            choice["finish_reason"],
            choice["stop_reason"],
            self.weights_version,
        )


# --- Helpers -----------------------------------------------------------------------------------------------------


def require_wanted(server: _Server, wanted: Callable[[], bool]) -> None:
    """Leave a server that came back out once the call has ended for which it was taken in."""
    if not wanted():
        raise EndpointError(f"{server} came back too late; it is taken in at the next load")


def save_for_servers(policy: Policy, folder: Path, *, untied: bool = False) -> None:
    """Write the policy aside, then under its name, so that no server reads half of it.

    `untied` writes tied embeddings a second time, as a head of their own: on a CPU, vLLM keeps a packed copy of the
    head, which a reload of tied embeddings would leave stale.
    """
    aside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    policy.model.save_pretrained(aside, max_shard_size="1TB")
    policy.tokenizer.save_pretrained(aside)
    if untied:
        weights = load_file(aside / "model.safetensors")
        weights["lm_head.weight"] = policy.model.get_output_embeddings().weight.detach().cpu().clone()
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(policy.model.config)
        config.tie_word_embeddings = False
        config.save_pretrained(aside)
    aside.rename(folder)


def server_command(
    folder: Path, device: str, port: int, dtype: str, context_length: int, settings: VLLMServerSettings
) -> tuple[list[str], dict[str, str]]:
    """The arguments after `python -m` and the environment of a server of our own, on loopback."""
    arguments = [
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    arguments += ["--dtype", dtype, "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"]
    arguments += ["--generation-config", "vllm", "--seed", "0", "--enable-scale-out"]
    if settings.max_model_len is not None:
        arguments += ["--max-model-len", str(settings.max_model_len)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if device == "cpu":
        # A block of 32 caches short prompts; a seeded request whose prompt is cut over two passes fails on a CPU.
        arguments += ["--enforce-eager", "--block-size", "32", "--no-enable-chunked-prefill"]
        arguments += ["--max-num-batched-tokens", str(max(4096, settings.max_model_len or context_length))]
        return arguments, {"VLLM_CPU_KVCACHE_SPACE": "1", **environment}
    arguments += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    arguments += ["--enforce-eager"] if settings.eager else []
    return arguments, {"CUDA_VISIBLE_DEVICES": device.removeprefix("cuda:"), **environment}
