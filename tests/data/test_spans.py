"""The loss falls on the answers and nothing else, for every kind of chat template."""

from __future__ import annotations

import numpy as np
import pytest

from fitune.data.conversations import Conversation
from fitune.data.encode import encode, encode_pieces
from fitune.data.spans import Piece
from fitune.data.template import CannotRender, choose_template
from tests.data.chat_templates import FAMILIES

WORDS = [
    "memory",
    "GPU ",
    " the\n",
    "显存",
    "不够",
    "🙂",
    "{x}",
    "1024",
    "\n\n",
    "don't",
    "é",
    "def f():\n    return 1",
    "  ",
    "？",
]


def learned(encoded, tokenizer) -> str:
    """The text under loss, in order."""
    ids = [int(i) for piece in encoded for i in piece.labels if i != -100]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def conversation(*messages, tools=None):
    return Conversation(tuple(messages), tools, 0)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def with_template(tokenizer, name):
    family = FAMILIES[name]
    tokenizer.chat_template = family.template
    if family.special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    return family


def random_text(rng) -> str:
    words = rng.choice(WORDS, size=rng.integers(1, 8)).tolist()
    text = "".join(words)
    return text if text.strip() else text + "x"


@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations_learn_exactly_the_answers_and_their_ends(name, tokenizer):
    family = with_template(tokenizer, name)
    choice = choose_template(tokenizer)
    rng = np.random.default_rng(7)
    for _ in range(40):
        turns = [(random_text(rng), random_text(rng)) for _ in range(rng.integers(1, 5))]
        messages = [m for q, a in turns for m in (user(q), assistant(a))]
        if rng.random() < 0.5:
            messages.insert(0, {"role": "system", "content": random_text(rng)})
        encoded = encode(conversation(*messages), tokenizer, choice, seq_len=10_000)
        assert len(encoded) == 1, "one record while no turn hides anything from later ones"
        answers = [a.strip() if family.trims else a for _, a in turns]
        if name == "qwen3":  # the template itself strips line breaks in front of the last answer
            answers[-1] = answers[-1].lstrip("\n")
        ends = [family.end] * (len(turns) - 1) + [family.last_end]
        expected = "".join(family.lead + a + e for a, e in zip(answers, ends, strict=True))
        if name == "glm4":  # white space next to a template's own is not told apart from it
            assert learned(encoded, tokenizer).split() == expected.split()
        else:
            assert learned(encoded, tokenizer) == expected


@pytest.mark.parametrize("name", ["chatml", "llama3", "mistral", "qwen3", "harmony", "glm4"])
def test_what_precedes_the_answer_is_the_prompt_shown_at_inference(name, tokenizer):
    with_template(tokenizer, name)
    question, answer = user("Why did it run out of memory?"), assistant("The batch was too long.")
    (encoded,) = encode(conversation(question, answer), tokenizer, choose_template(tokenizer), seq_len=1000)
    text = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
    if name == "qwen3":
        text += "<think>\n\n</think>\n\n"  # what the template writes where there is no reasoning
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = int(np.argmax(encoded.labels != -100))
    assert encoded.input_ids[:first].tolist() == prompt


def test_smollm2_own_template_from_the_gguf(smollm2):
    choice = choose_template(smollm2)
    assert choice.name == "own" and choice.system and choice.consecutive and not choice.tools
    (encoded,) = encode(conversation(user("hi"), assistant("Hello.")), smollm2, choice, seq_len=1000)
    assert "You are a helpful AI assistant named SmolLM" in smollm2.decode(encoded.input_ids)
    assert learned([encoded], smollm2) == "Hello.<|im_end|>"


def test_the_end_of_turn_is_learned_and_the_line_break_after_it_is_not(smollm2):
    choice = choose_template(smollm2)
    (encoded,) = encode(conversation(user("a"), assistant("b")), smollm2, choice, seq_len=1000)
    end = smollm2.convert_tokens_to_ids("<|im_end|>")
    assert encoded.labels.tolist()[-2:] == [end, -100] and encoded.input_ids[-1] == smollm2("\n")["input_ids"][0]


def test_reasoning_hidden_from_later_turns_gets_a_record_of_its_own(tokenizer):
    with_template(tokenizer, "qwen3")
    choice = choose_template(tokenizer)
    assert choice.reasoning_key == "reasoning_content" and choice.tools
    messages = [
        user("one?"), assistant("1", reasoning_content="first thought"),
        user("two?"), assistant("2", reasoning_content="second thought"),
    ]  # fmt: skip
    first, second = encode(conversation(*messages), tokenizer, choice, seq_len=1000)
    assert learned([first], tokenizer) == "<think>\nfirst thought\n</think>\n\n1<|im_end|>"
    assert learned([second], tokenizer) == "<think>\nsecond thought\n</think>\n\n2<|im_end|>"
    assert "first thought" not in tokenizer.decode(second.input_ids), "later turns see the answer without its reasoning"


def test_reasoning_within_a_tool_loop_stays_in_one_record(tokenizer):
    with_template(tokenizer, "qwen3")
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
    tools = ({"type": "function", "function": {"name": "weather", "parameters": {}}},)
    messages = [
        user("weather?"), assistant("", reasoning_content="ask the tool", tool_calls=[call]),
        {"role": "tool", "content": "35"}, assistant("It is 35.", reasoning_content="read it"),
    ]  # fmt: skip
    (encoded,) = encode(conversation(*messages, tools=tools), tokenizer, choose_template(tokenizer), seq_len=1000)
    assert learned([encoded], tokenizer) == (
        '<think>\nask the tool\n</think>\n\n\n<tool_call>\nweather {"city": "Paris"}\n</tool_call><|im_end|>'
        "<think>\nread it\n</think>\n\nIt is 35.<|im_end|>"
    )


def test_inline_reasoning_that_the_template_would_cut_out_is_kept(tokenizer):
    with_template(tokenizer, "r1")
    answer = "<think>\nlong thought\n</think>\n\n42"
    (encoded,) = encode(
        conversation(user("6x7?"), assistant(answer)), tokenizer, choose_template(tokenizer), seq_len=99
    )
    # the generation prompt already holds "<think>\n", so the model learns what comes after it
    assert learned([encoded], tokenizer) == "long thought\n</think>\n\n42<|end|>"


def test_messages_marked_as_not_trained_on(tokenizer):
    choice = choose_template(tokenizer)
    messages = [user("a?"), assistant("first", loss=False), user("b?"), assistant("second")]
    (encoded,) = encode(conversation(*messages), tokenizer, choice, seq_len=1000)
    assert learned([encoded], tokenizer) == "second<|im_end|>"
    (everything,) = encode(conversation(*messages), tokenizer, choice, seq_len=1000, loss_on="all")
    text = learned([everything], tokenizer)
    assert "a?" in text and "second<|im_end|>" in text and "first" not in text


def test_loss_on_all_covers_every_token(smollm2):
    choice = choose_template(smollm2)
    (encoded,) = encode(conversation(user("a?"), assistant("b")), smollm2, choice, seq_len=1000, loss_on="all")
    assert (encoded.labels == encoded.input_ids).all()


def test_generation_marks_agree_with_the_spans_found_without_them(tokenizer):
    body = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + body
        + "{{ '\n' }}"
        "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [user("a?"), assistant("It is so."), user("b?"), assistant("好的")]
    (encoded,) = encode(conversation(*messages), tokenizer, choose_template(tokenizer), seq_len=1000)
    marked = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True, tokenize=True)
    assert encoded.input_ids.tolist() == list(marked["input_ids"])
    assert (encoded.labels != -100).astype(int).tolist() == list(marked["assistant_masks"])


def test_a_template_that_hides_where_a_tool_call_starts_is_refused(tokenizer):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
        "{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|a|>' }}{% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(CannotRender, match="does not show where the answer starts"):
        encode(
            conversation(user("q"), assistant("", tool_calls=[call])), tokenizer, choose_template(tokenizer), seq_len=99
        )


def test_sentencepiece_like_tokenizers_are_not_given_a_space_at_each_cut():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    raw = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    )
    raw.train_from_iterator(["the answer is here and there, the question is why? " * 20, "\n"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    text = "<s>[INST] why? [/INST] the answer</s>"
    start = text.index(" the answer")
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    (encoded,) = encode_pieces([Piece(text, ((start, len(text)),))], tokenizer, 100)
    assert encoded.input_ids.tolist() == whole
    under_loss = [int(i) for i in encoded.labels if i != -100]
    assert tokenizer.decode(under_loss).replace(" ", "") == "theanswer</s>"
    assert len(under_loss) < len(whole) - 3
