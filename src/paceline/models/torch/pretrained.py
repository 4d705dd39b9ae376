"""transformers' models taken apart: loaded from files, cut into decoder and head, and asked for logits of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from paceline.errors import ModelFormatError, PacelineError
from paceline.models.files.boundary import brief, name_of, reading

CHECK_LENGTH = 12  # tokens per row of the checks
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # relative to the norm of the logits
# Largest relative change of earlier logits by later tokens in float32. Rounding is below it; BERTs have 4e-4 and more.
LEAK = 1e-5
T = TypeVar("T")


def load_pretrained(path: Path, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model of a directory with safetensors files by transformers.

    Raises ModelFormatError if a file is damaged, or a weight is missing or unexpected.
    """
    if (path / "adapter_config.json").exists():
        raise ModelFormatError(
            f"{path}: adapter_config.json lies beside the model, and transformers would apply it. Move it away "
            "if it is merged; else give its own directory in adapters"
        )
    with reading(path, "cannot be loaded by transformers"):
        config = AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        model, info = _auto_class(config, path).from_pretrained(
            str(path),
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    problems = [f"{kind}: {name}" for kind, names in info.items() for name in list(names)[:4]]
    if problems:
        raise ModelFormatError(f"{path}: the weights do not fit the configuration ({brief('; '.join(problems))})")
    loaded: PreTrainedModel = model.to(device)
    return loaded


def _auto_class(config: PretrainedConfig, path: Path) -> Any:
    """Return transformers' auto class for generative text models of this type. Raises ModelFormatError."""
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise ModelFormatError(f"{path}: models of type {config.model_type!r} do not generate text token by token")


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model that shares its weights, in evaluation mode."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in model.parameters()}).eval()


@dataclass
class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output in which every other attribute is None, whatever the head reads."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Echo(nn.Module):
    """Replaces the decoder and returns its input, so that the model computes logits of given hidden states.

    Other attributes are the decoder's: Falcon-H1's head reads a factor of it.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.__dict__["_replaced"] = decoder  # not one of its modules

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_replaced"], name)

    @property
    def decoder(self) -> _Echo:
        """The decoder within a wrapper, as models have it whose classes are also those of encoders."""
        return self

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


def decoder_and_head(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the decoder of a model, and the model with an echo in its place. Raises ModelFormatError."""
    children = {name: module for name, module in model._modules.items() if isinstance(module, PreTrainedModel)}
    name = model.base_model_prefix
    if name not in children:  # Llama 4's classes name another one
        name = next((name for name, module in children.items() if module.get_output_embeddings() is None), "")
    refuse_unless(model, name in children, "it has no separate decoder")
    head = copy.copy(model)
    head._modules = {**model._modules, name: _Echo(children[name])}
    multimodal = model.config.get_text_config() is not model.config  # only the text model is kept
    return model.get_decoder() if multimodal else children[name], head


@torch.no_grad()
def logits_of(head: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return the logits [..., vocabulary], float32, of hidden states [..., width], scaled and soft-capped."""
    logits: Tensor = head(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False).logits
    return logits.view(*hidden.shape[:-1], -1).float()


def bytes_of(*models: PreTrainedModel) -> int:
    """Return the bytes of all weights. Tied weights are counted once."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    return sum({tensor.data_ptr(): int(tensor.nbytes) for tensor in parameters}.values())


# Checks on construction


def refuse_unless(model: PreTrainedModel, supported: bool, reason: str) -> None:
    """Raise ModelFormatError with the reason unless the model is supported."""
    if not supported:
        raise ModelFormatError(f"{name_of(model)} cannot be run: {reason}")


def attempt(name: str, call: Callable[[], T]) -> T:
    """Call the model's code, which may raise any exception. Raises ModelFormatError."""
    try:
        return call()
    except PacelineError:
        raise
    except Exception as error:
        raise ModelFormatError(f"{name} cannot be run: transformers' code fails with {brief(error)}") from error


def check_tokens(model: PreTrainedModel) -> Tensor:
    """Return random tokens [2, CHECK_LENGTH] of the model's vocabulary."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    return torch.randint(vocabulary, (2, CHECK_LENGTH), generator=generator).to(model.device)


@torch.no_grad()
def own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the model's logits [B, L, vocabulary], float32, of tokens [B, L]. Raises ModelFormatError."""
    logits: Tensor = attempt(name_of(model), lambda: model(input_ids=tokens, use_cache=False).logits.float())
    return logits


def check_causal(model: PreTrainedModel, tokens: Tensor, logits: Tensor) -> None:
    """Check that no token changes the logits before it. Raises ModelFormatError.

    Rounding in low precision can also change them, so a difference is measured again in float32.
    """
    others, half, vocabulary = tokens.clone(), CHECK_LENGTH // 2, logits.shape[-1]
    others[:, half:] = (others[:, half:] + 1 + vocabulary // 2) % vocabulary
    leak = distance(own_logits(model, others)[:, :half], logits[:, :half])
    if leak > 0 and model.dtype != torch.float32:
        exact = copy.deepcopy(model).float()
        before, after = (own_logits(exact, inputs)[:, :half] for inputs in (tokens, others))
        leak = distance(after, before)
    refuse_unless(model, leak <= LEAK, f"it is not causal: later tokens change its earlier logits by {leak:.2g}")


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of ``wanted``."""
    return float((found - wanted).norm() / wanted.norm())
