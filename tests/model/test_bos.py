"""BOS before prompts, where the tokenizer puts it before texts."""

import copy
import json

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from veritune.cli import main
from veritune.core.errors import ConfigError
from veritune.core.run_folder import RunFolder
from veritune.model.policy import Policy, encode_prompts, load_policy, save_policy

TEXTS = ["Use 9, 5, 18 to make 4.\n<think>\n", " two", "<s>already", "é"]


def with_bos(policy, single):
    """The policy with a token <s>, and a tokenizer that encodes texts as `single`, such as "<s> $A", says."""
    backend = Tokenizer.from_str(policy.tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<s>"])
    ids = {name: backend.token_to_id(name) for name in ("<s>", "<|endoftext|>")}
    if single:
        backend.post_processor = TemplateProcessing(single=single, special_tokens=list(ids.items()))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<|endoftext|>")
    model = copy.deepcopy(policy.model)
    model.resize_token_embeddings(len(tokenizer))
    return Policy(model, tokenizer, policy.eos_ids, policy.context_length)


@pytest.fixture
def saved(random_policy, tmp_path):
    def save(single):
        save_policy(with_bos(random_policy, single), tmp_path / "policy")
        return str(tmp_path / "policy")

    return save


@pytest.mark.parametrize("single, ends", [("<s> $A", 0), ("<s> $A <|endoftext|>", 1), ("", 0), ("$A <|endoftext|>", 1)])
def test_auto_starts_a_prompt_as_the_tokenizer_starts_a_text_and_ends_it_with_nothing(saved, single, ends):
    policy = load_policy(saved(single))
    for text in TEXTS:
        expected = policy.tokenizer(text).input_ids
        expected = expected[: len(expected) - ends]
        if single.startswith("<s>") and text.startswith("<s>"):
            expected = expected[1:]  # a template that says its BOS itself is not given a second one
        assert encode_prompts(policy, [text]) == [expected]


def test_always_and_never(saved, random_policy):
    folder = saved("<s> $A")
    bos = load_policy(folder).tokenizer.convert_tokens_to_ids("<s>")
    bare = random_policy.encode("two")
    for choice, expected in (("auto", [bos, *bare]), ("always", [bos, *bare]), ("never", bare)):
        assert encode_prompts(load_policy(folder, bos=choice), ["two"]) == [expected]
    folder = saved("")  # a tokenizer that has a BOS and does not use it
    for choice, expected in (("auto", bare), ("always", [bos, *bare]), ("never", bare)):
        assert encode_prompts(load_policy(folder, bos=choice), ["two"]) == [expected]


def test_a_chat_template_states_its_own_beginning(saved):
    folder = saved("<s> $A")
    for start, choice, expected in (
        ("<s>", "auto", "<s>two"),
        ("<s>", "always", "<s>two"),
        ("", "auto", "two"),
        ("", "always", "<s>two"),
    ):
        policy = load_policy(folder)
        policy.tokenizer.chat_template = start + "{{ messages[0].content }}"
        save_policy(policy, folder)
        policy = load_policy(folder, chat=True, bos=choice)
        assert policy.tokenizer.decode(encode_prompts(policy, ["two"])[0]) == expected


def test_a_tokenizer_without_bos_cannot_always_start_with_it():
    message = "^bos is 'always', but the tokenizer of policy 'embedded' has no BOS token; use auto or never$"
    with pytest.raises(ConfigError, match=message):
        load_policy("embedded", bos="always")
    assert load_policy("embedded").bos == ()


@pytest.mark.parametrize("flags, shown", [([], "<s>"), (["--bos", "never"], "")])
def test_a_run_starts_its_prompts_so_and_records_it(saved, tmp_path, flags, shown):
    folder, run = saved("<s> $A"), tmp_path / "run"
    flags = ["--policy", folder, "--validation-examples", "3", "--max-tokens", "4", "--run", str(run), *flags]
    with pytest.raises(SystemExit) as ended:
        main(["eval", *flags])
    assert ended.value.code == 0
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    rows = RunFolder.open(run).read_rows("validation", 0)
    assert len(rows) == 3
    for row in rows:
        ids = tokenizer(row["question"] + "\n<think>\n").input_ids
        assert row["prompt_ids"] == (ids if shown else ids[1:])
    assert json.loads((run / "environment.json").read_text())["bos"] == shown
