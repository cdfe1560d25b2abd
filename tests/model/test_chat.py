"""Prompts in the model's own chat template."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from veritune.core.errors import ConfigError
from veritune.model.policy import encode_prompts, load_policy, save_policy

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chatting(random_policy):
    tokenizer = copy.deepcopy(random_policy.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return dataclasses.replace(random_policy, tokenizer=tokenizer, chat=True)


@pytest.mark.parametrize("question", ["What is 2+2?", "{{ messages }} {% x %} {question}", "two\nlines"])
def test_a_prompt_is_the_users_message_up_to_where_the_model_answers(chatting, random_policy, question):
    (ids,) = encode_prompts(chatting, [question])
    assert chatting.tokenizer.decode(ids) == f"<user>{question}</user><assistant>"
    assert encode_prompts(random_policy, [question]) == [random_policy.encode(question)]


def test_chat_is_wanted_of_a_policy_that_has_a_template(chatting, random_policy, tmp_path):
    save_policy(chatting, tmp_path / "with")
    save_policy(random_policy, tmp_path / "without")
    loaded = load_policy(str(tmp_path / "with"), chat=True)
    assert encode_prompts(loaded, ["hello"]) == encode_prompts(chatting, ["hello"])
    assert not load_policy(str(tmp_path / "with")).chat
    with pytest.raises(ConfigError, match=r"chat is True, but the tokenizer of policy .* has no chat template"):
        load_policy(str(tmp_path / "without"), chat=True)
