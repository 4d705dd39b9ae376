"""Block drafters: published layouts, equality with transformers' own class, and what the kinds have in common."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from block_support import (
    LAYOUTS,
    MASK,
    NEW_LAYERS,
    SIZE,
    BlockReading,
    block_config,
    published_block,
    published_gguf,
    random_block,
    tiny_block,
)
from head_support import features_of, write
from paceline import LLM
from paceline.config import SamplingParams
from paceline.core.batch import Batch, SpeculationPlan
from paceline.core.draft import Draft
from paceline.core.slots import Slots
from paceline.drafters.heads.block import BlockHead
from paceline.drafters.heads.block_decoder import BlockDecoder, TorchBlock, TorchBlockDecoder
from paceline.drafters.heads.block_layouts import read_block
from paceline.drafters.heads.block_spec import BlockSpec
from paceline.drafters.heads.checkpoint import load_head, read_head_config, save_head
from paceline.engine.engine import Engine
from paceline.errors import ModelFormatError, ParameterError
from paceline.kernels.attention.reference import ReferenceAttention
from paceline.lengths.calibration import Calibration, Grid
from paceline.models.decoding.draft_vocabulary import NEVER
from toy import VOCAB, RandomStops, make_engine, run, tiny_llama, tiny_llama_of_transformers

pytestmark = pytest.mark.usefixtures("one_thread")

SCALES = {"output_multiplier": 0.5, "logits_cap": 6.0, "embedding_scale": 1.5}  # of the kind "dflash2"
KINDS = {  # layout -> kind, rows that draft, whether layers are causal
    "dflash": ("dflash", SIZE - 1, None),
    "dflash, newer": ("dflash", SIZE - 1, False),
    "deepspec": ("dspark", SIZE, None),
    "deepspec without a Markov head": ("dflash", SIZE, None),
    "specforge": ("dspark", SIZE, None),
    "dflash2": ("dflash2", SIZE - 1, False),
    "muse_glimmer": ("dflash", SIZE - 1, False),
    "speculators dflash": ("dflash", SIZE - 1, None),
    "speculators dspark": ("dspark", SIZE, None),
    "speculators dflash2": ("dflash2", SIZE - 1, False),
}


def llm_with(drafter_path: Path, **options: Any) -> LLM:
    common = {"dtype": "float32", "device": "cpu", "max_batch_size": 2, "attention": "padded", "threads": 1}
    return LLM(tiny_llama_of_transformers(), drafter_path, **(common | {"num_speculative_tokens": 3} | options))


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=1.0, max_tokens=16, seed=3, n=2)
    (output,) = llm.generate([1, 2, 3, 4], params, use_tqdm=False)
    return [answer.token_ids for answer in output.outputs]


def drafts_of(engine: Engine) -> list[Draft]:
    """A list of the engine's drafts, which grows as rounds run."""
    drafts: list[Draft] = []
    propose = engine.parts.drafter.propose

    def asked(batch: Batch, plan: SpeculationPlan) -> Draft:
        drafts.append(propose(batch, plan))
        return drafts[-1]

    engine.parts.drafter.propose = asked  # type: ignore[method-assign]
    return drafts


@pytest.mark.usefixtures("no_requests")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_directory_of_each_layout_drafts_for_its_target(tmp_path: Path, layout: str) -> None:
    llm = llm_with(published_block(tmp_path, layout), drafter="feature")
    kind, most, causal = KINDS[layout]
    model = llm.engine.models.draft
    assert isinstance(model, TorchBlock)
    assert (model.kind, model.max_draft_tokens, model.taps) == (kind, most, (0, 1))
    assert model.head.spec.causal is causal
    window = 4 if "sliding_attention" in LAYOUTS[layout].get("layer_types", ()) else None
    assert model.head.config.decoder.attentions[0].window == (5 if layout == "muse_glimmer" else window)
    drafts = drafts_of(llm.engine)
    assert answers(llm) == answers(llm.plain())
    assert sum(sum(draft.drafted) for draft in drafts) > 0
    assert "drafter D" in llm.engine.describe()


@pytest.mark.parametrize("layout", ["deepspec", "speculators dspark"])
def test_a_written_drafter_has_the_layout_of_speculators(tmp_path: Path, layout: str) -> None:
    path = published_block(tmp_path / "one", layout, paceline={"paying_rows": {"cpu": 3}})
    head = load_head(path, dtype=torch.float32)
    save_head(head, tmp_path / "two")
    again = load_head(tmp_path / "two", dtype=torch.float32, embedding=head.embed_tokens.weight)
    assert again.config.paying_rows == {"cpu": 3}
    assert (again.config.block, again.config.taps) == (head.config.block, head.config.taps)
    assert again.config.decoder == head.config.decoder
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in head.state_dict().items())
    fields = json.loads((tmp_path / "two" / "config.json").read_text())
    published = LAYOUTS["speculators dspark"]
    assert published.keys() <= fields.keys()
    assert fields["speculators_config"].keys() == published["speculators_config"].keys()
    assert fields["speculators_model_type"] == "dspark"


@pytest.mark.usefixtures("no_requests")
def test_a_drafter_without_ends_shares_its_targets(tmp_path: Path) -> None:
    llm = llm_with(published_block(tmp_path, "dflash"))
    target, model = llm.engine.models.target, llm.engine.models.draft
    assert isinstance(model, TorchBlock)
    embedding, output, _ = target.ends()  # type: ignore[attr-defined]
    assert model.head.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    assert model.head.lm_head.weight.data_ptr() == output.weight.data_ptr()
    everything = sum(tensor.nbytes for tensor in model.head.state_dict().values())
    assert model.weight_bytes() == everything - embedding.nbytes - output.weight.nbytes


@pytest.mark.usefixtures("no_requests")
@pytest.mark.parametrize("kind", ["dflash", "anchor first", "dspark", "dflash2"])
def test_a_gguf_file_of_each_kind_drafts_for_its_target(tmp_path: Path, kind: str) -> None:
    llm = llm_with(published_gguf(tmp_path / "drafter.gguf", kind), drafter="feature")
    model = llm.engine.models.draft
    assert isinstance(model, TorchBlock)
    whole = kind == "dflash2"
    config = block_config(kind, VOCAB, 32, (0, 1), None if whole else 16)
    assert config.block is not None
    absent: dict[str, Any] = {"output_multiplier": 1.0, "embedding_scale": 1.0}  # files do not have these two
    assert model.head.spec == replace(config.block, **absent)
    ours, theirs = (
        [(layer.window, layer.rotary) for layer in each.decoder.attentions] for each in (model.head.config, config)
    )
    assert ours == theirs
    state = model.head.state_dict()
    for name, tensor in random_block(config).items():
        if name not in ("embed_tokens.weight", *(("lm_head.weight", "d2t", "t2d") if whole else ())):
            assert torch.equal(state[name], tensor), name
    assert answers(llm) == answers(llm.plain())


def test_unknown_metadata_of_a_gguf_file_are_refused(tmp_path: Path) -> None:
    path = published_gguf(tmp_path / "drafter.gguf", "dflash", **{"attention.sinks": 1})
    with pytest.raises(ModelFormatError, match=r"unknown keys attention\.sinks"):
        llm_with(path)
    with pytest.raises(ParameterError, match="a model; this is a trained head"):
        LLM(path)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {  # layout, changed fields, message
    "an unknown class": ("dflash", {"architectures": ["LagunaDFlashModel"]}, "class LagunaDFlashModel"),
    "Gemma's layers": ("deepspec", {"architectures": ["Gemma4DSparkModel"]}, "class Gemma4DSparkModel"),
    "another projector": ("specforge", {"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
    "an unknown key": ("dflash", {"layer_fusion": 2}, "unknown keys layer_fusion"),
    "an unknown key within": ("dflash", {"dflash_config": {"prefix_gru": True}}, "unknown keys prefix_gru"),
    "an unknown key of layers": (
        "speculators dflash",
        {"transformer_layer_config": NEW_LAYERS | {"qkv_fused": True}},
        "unknown keys is_causal, qkv_fused",
    ),
    "sinks": ("dflash", {"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias=True"),
    "a scale": ("dflash", {"logit_scale": 2.0}, r"logit_scale=2\.0"),
    "a window of its own": (
        "dflash",
        {"dflash_config": {"use_swa": True, "swa_window_size": 4, "mask_token_id": 1, "target_layer_ids": [0]}},
        "use_swa of dflash_config",
    ),
    "no mask": ("dflash", {"dflash_config": {"target_layer_ids": [0]}}, "lacks mask_token_id"),
    "no block": ("dflash", {"block_size": None}, "lacks block_size"),
    "a block of one": ("dflash", {"block_size": 1}, "block_size 1, which is from 2 to 32"),
    "a mask outside": ("deepspec", {"mask_token_id": VOCAB}, f"mask_token_id {VOCAB} outside"),
    "rows of no kind": ("dflash", {"markov_rank": 4}, "markov_rank without sample_from_anchor"),
    "no layers": ("deepspec", {"target_layer_ids": None, "num_target_layers": None}, "lacks target_layer_ids"),
    "a Markov head of no kind": ("deepspec", {"markov_head_type": "fir"}, "markov_head_type 'fir'"),
    "confidence without": ("deepspec", {"markov_rank": 0}, "confidence_head_with_markov without a Markov head"),
    "half a selector": ("speculators dflash2", {"selector_top_k": 0}, "a selector without"),
    "a selector of few": ("speculators dflash2", {"draft_vocab_size": 16}, "a selector over a reduced vocabulary"),
    "groups that do not divide": ("speculators dflash2", {"conv_group_size": 5}, "conv_group_size 5, which does not"),
    "an anchor that drafts": ("speculators dflash2", {"sample_from_anchor": True}, "sample_from_anchor"),
    "quantised": ("dflash", {"quantization_config": {"bits": 4}}, "quantised"),
    "Llama's layers": (
        "speculators dflash",
        {"transformer_layer_config": {"model_type": "llama"}},
        "model_type 'llama'; only qwen3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_by_name(tmp_path: Path, name: str) -> None:
    layout, changed, said = REFUSED[name]
    fields = {key: value for key, value in (LAYOUTS[layout] | changed).items() if value is not None}
    path = write(tmp_path / "drafter", fields, {"fc.weight": torch.zeros(1)})
    with pytest.raises(ModelFormatError, match=said):
        read_head_config(path, VOCAB)
    with pytest.raises(ModelFormatError, match=said):
        llm_with(path)


CHANGES: dict[str, tuple[dict[str, Tensor | None], str]] = {  # tensors that are changed or removed, message
    "missing": ({"layers.1.self_attn.q_norm.weight": None}, r"lacks layers\.1\.self_attn\.q_norm\.weight"),
    "unknown": ({"layers.0.self_attn.sinks": torch.zeros(4)}, r"no layers\.0\.self_attn\.sinks"),
    "mis-shaped": ({"fc.weight": torch.zeros(32, 96)}, r"fc\.weight has the shape"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_missing_and_unknown_tensors_are_named(tmp_path: Path, name: str) -> None:
    changes, said = CHANGES[name]
    tensors = load_file(published_block(tmp_path / "one", "dflash2") / "model.safetensors") | changes
    given = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ModelFormatError, match=said):
        llm_with(write(tmp_path / "two", LAYOUTS["dflash2"], given))


def test_a_pickled_mask_is_refused(tmp_path: Path) -> None:
    path = published_block(tmp_path, "dflash")
    (path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelFormatError, match="a pickle with an embedding of the mask"):
        llm_with(path)


@pytest.mark.parametrize(
    ("layers", "depth", "ids"), [(36, 5, (1, 9, 17, 25, 33)), (30, 5, (1, 8, 14, 20, 27)), (28, 1, (14,))]
)
def test_layers_that_are_not_named_lie_at_equal_distances(layers: int, depth: int, ids: tuple[int, ...]) -> None:
    """A layer's output is the input of the next one."""
    fields = LAYOUTS["dflash"] | {"num_target_layers": layers, "num_hidden_layers": depth}
    del fields["layer_types"]
    fields["dflash_config"] = {"mask_token_id": MASK}
    assert read_block(fields, "dflash").taps_of(layers) == tuple(layer + 1 for layer in ids)


def test_the_last_layers_output_is_refused() -> None:
    """Programs differ in whether it is the state before or after the last norm."""
    fields = LAYOUTS["deepspec"] | {"target_layer_ids": [0, 8]}
    with pytest.raises(ModelFormatError, match=r"layers \(1, 9\); this target has 9 layers"):
        read_block(fields, "deepspec").taps_of(9)


# Equality with transformers' class, and identities


def states_of(
    decoder: BlockDecoder, anchors: Tensor, done: list[int], lengths: list[int], rows: list[int] | None = None
) -> Tensor:
    """States of the rows of a block behind texts whose first ``done`` tokens are stored; the others are stored now."""
    slots = list(range(len(lengths))) if rows is None else rows
    places = [(slot, at) for slot, first, end in zip(slots, done, lengths, strict=True) for at in range(first, end)]
    if places:
        rows_of, positions = torch.tensor(places).T.contiguous()
        decoder.inject(rows_of, positions)
    return decoder.run_block(anchors, torch.tensor(lengths), max(lengths) + 1, Slots.listed(slots, torch.device("cpu")))


@torch.no_grad()
@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_states_equal_those_of_transformers_for_one_row_and_three(tmp_path: Path, kinds: list[str]) -> None:
    """Six rounds; in each, rows gain 1 to 5 tokens."""
    torch.manual_seed(0)
    shape = {name: value for name, value in NEW_LAYERS.items() if name not in ("is_causal", "dtype", "vocab_size")}
    shape |= {"layer_types": kinds, "sliding_window": 6}
    config = MuseGlimmerAssistantConfig(**shape, block_size=SIZE, mask_token_id=MASK, target_layer_ids=[-1, 0])
    theirs = MuseGlimmerAssistantModel(config).eval()
    for weight in theirs.parameters():
        weight.add_(torch.randn_like(weight) * 0.2)
    theirs.save_pretrained(tmp_path)
    embedding = torch.randn(VOCAB, 32)
    head = load_head(tmp_path, dtype=torch.float32, embedding=embedding, output=lambda: embedding, vocab_size=VOCAB)
    assert isinstance(head, BlockHead)
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 40, 2, 32, generator=generator)
    decoder = TorchBlockDecoder(TorchBlock(head, "drafter", (0, 1), 64), ReferenceAttention(), 3, 40)
    for row in range(3):
        decoder.fused_states.read(torch.full((40,), row), torch.arange(40), features[row])
    caches = [DFlashCache(config=config) for _ in range(3)]
    for cache in caches:
        cache.activate_past_recording()
    done, lengths = [0, 0, 0], [1, 7, 12]
    for _ in range(6):
        tokens = torch.randint(VOCAB, (3,), generator=generator)
        ours = states_of(decoder, tokens, done, lengths)
        for row in range(3):
            caches[row].set_previous_accepted_tokens(lengths[row] - done[row])
            expected = theirs(
                noise_embeds=embedding[torch.tensor([int(tokens[row]), *[MASK] * (SIZE - 1)])][None],
                context_hidden_states=features[row : row + 1, done[row] : lengths[row]].flatten(2),
                position_ids=torch.arange(done[row], lengths[row] + SIZE)[None],
                cache=caches[row],
            ).last_hidden_state
            caches[row].crop(-SIZE)
            torch.testing.assert_close(ours[row], expected[0, 1:], rtol=1e-4, atol=2e-5)
            alone = states_of(decoder, tokens[row : row + 1], [lengths[row]], [lengths[row]], [row])
            torch.testing.assert_close(alone[0], ours[row], rtol=1e-5, atol=1e-6)
        done = lengths[:]
        lengths = [length + 1 + int(torch.randint(SIZE, (), generator=generator)) for length in lengths]


@pytest.mark.parametrize("kind", ["dspark", "dspark gated", "dspark rnn"])
def test_the_stop_rule_sees_the_drafters_own_confidence(kind: str) -> None:
    target = tiny_llama()
    model = tiny_block(target, 32, kind)
    engine, compared = make_engine(target, model, drafter="feature"), []
    reading, propose = BlockReading(model.head.config, model.head.state_dict()), engine.parts.drafter.propose

    def check(batch: Batch, plan: SpeculationPlan) -> Draft:
        draft = propose(batch, plan)
        for row, tokens in enumerate(draft.draft_tokens):
            text = batch.tokens[row, : batch.lengths[row]].tolist()
            rows = reading.rows(text[-1], features_of(target, text[:-1], model.taps))
            assert draft.confidence is not None
            for place, (token, score) in enumerate(zip(tokens, draft.confidence[row], strict=True)):
                path = [text[-1], *tokens[:place]]
                logits = reading.logits(rows, path)
                own = reading.confidence(rows, path) if model.head.spec.confidence else float(logits.softmax(-1).max())
                assert (int(logits.argmax()), pytest.approx(own, abs=1e-4)) == (token, score)
                compared.append(score)
        return draft

    engine.parts.drafter.propose = check  # type: ignore[method-assign]
    engine.use_policy(RandomStops(seed=1))
    run(engine, [[1, 2, 3], [4, 5, 6, 7]], [SamplingParams(temperature=0, max_tokens=20)] * 2)
    assert len(compared) > 20


def test_identity_convolutions_and_an_empty_codebook_draft_as_a_dflash() -> None:
    target = tiny_llama()
    config = block_config("dflash2", VOCAB, 32, (0, 1))
    assert config.block is not None
    simple = replace(config, block=BlockSpec(SIZE, config.block.mask_token, causal=False, **SCALES))
    drafted = []
    for each in (config, simple):
        head = BlockHead(each)
        head.load_state_dict(head.state_dict() | random_block(simple))
        for name, weight in head.named_parameters():
            if "kernel_projection" in name:
                weight.data.zero_()
        model = TorchBlock(head.requires_grad_(False), "drafter", (0, 1), 96)
        engine = make_engine(target, model, drafter="feature", num_speculative_tokens=4)
        drafts = drafts_of(engine)
        run(engine, [[1, 2, 3], [4, 5]], [SamplingParams(temperature=0, max_tokens=12)] * 2)
        drafted.append([draft.draft_tokens for draft in drafts])
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) > 2


def test_a_selector_chooses_among_the_tokens_that_are_scored() -> None:
    config = block_config("dflash2", VOCAB, 32, (0, 1))
    head = BlockHead(config)
    head.load_state_dict(random_block(config))
    selector, generator = head.candidate_selector, torch.Generator().manual_seed(0)
    assert selector is not None
    tokens = torch.randperm(VOCAB, generator=generator)[:9]
    logits, state = (torch.randn(2, size, generator=generator) for size in (VOCAB, 32))
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, tokens, False)
    expected = selector.scores(logits.masked_fill(others, NEVER), state, torch.tensor([3, 4]), None)[:, tokens]
    torch.testing.assert_close(selector.scores(logits[:, tokens], state, torch.tensor([3, 4]), tokens), expected)
    few = selector.scores(logits[:, :2], state, torch.tensor([3, 4]), torch.tensor([0, 1]))
    assert (few > NEVER).all(), "fewer tokens than it chooses among"


def test_auto_counts_one_pass_whatever_the_length() -> None:
    engine = make_engine(tiny_llama(), tiny_block(tiny_llama(), 32), drafter="hybrid", num_speculative_tokens=3)
    parts = engine.parts
    table = Calibration(parts.target, parts.drafter, parts.accept, Grid((1, 2), (0, 2), seconds=0.0)).run()
    assert table.one_pass
    assert table.draft_step == (0.0, 0.0)
    assert table.draft_ms(2, 1) == table.draft_ms(2, 7) > 0
