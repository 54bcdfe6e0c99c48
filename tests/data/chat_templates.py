"""Chat templates written for the tests, each with a trait of a family that breaks naive masking."""

from __future__ import annotations

from dataclasses import dataclass

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Like Llama 3: contents are trimmed, the header is three special tokens and two line breaks.
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

# Like Mistral: no system role, strict alternation, no generation prompt, and the end token right after the answer.
MISTRAL = (
    "{{ '<s>' }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate user/assistant') }}"
    "{% endif %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"
)

# Like Qwen3: reasoning of earlier turns is cut out, the last turn gets an empty thought when it has none.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}"
    "{% set content = m.content %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{% else %}{{ content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' + c.function.name + ' ' + c.function.arguments | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Like DeepSeek-R1's distilled models: the generation prompt opens a thought that no rendered answer has.
R1 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1] %}{{ '<|assistant|>' + content + '<|end|>' }}"
    "{% else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)

# Like GLM-4: nothing ends a turn but the header of the next one.
GLM4 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Like gpt-oss: a turn ends differently when it is the last one.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

# Like Phi-3: the end token of the whole text follows the last end of turn.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)

# Like Cohere's: two special tokens end a turn, and the next header follows without a gap.
COHERE = (
    "{% for m in messages %}{{ '<|turn|><|' + m.role + '|>' + m.content }}"
    "{{ '<|end_response|>' if m.role == 'assistant' }}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|><|assistant|>' }}{% endif %}"
)

# Like Qwen3.5: the generation prompt opens a thought; earlier answers have none, the last one has an empty one.
QWEN35 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template with what the tests expect of it.

    Attributes:
        template: Jinja text.
        special: special tokens to add to the tokenizer.
        end: what ends an answer that is not the last; last_end: what ends the last one.
        lead: what the model writes before the answer itself.
        trims: contents lose white space at both ends.
    """

    template: str
    special: tuple[str, ...]
    end: str
    last_end: str
    lead: str = ""
    trims: bool = False


FAMILIES = {
    "chatml": Family(CHATML, (), "<|im_end|>", "<|im_end|>"),
    "llama3": Family(
        LLAMA3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|eot_id|>",
        trims=True,
    ),
    "mistral": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>", lead=" "),
    "qwen3": Family(QWEN3, (), "<|im_end|>", "<|im_end|>"),
    "r1": Family(R1, ("<|assistant|>", "<|user|>", "<|system|>", "<|end|>"), "<|end|>", "<|end|>"),
    "glm4": Family(GLM4, ("<|assistant|>", "<|user|>", "<|system|>"), "<|user|>", "<|im_end|>", lead="\n"),
    "phi3": Family(PHI3, ("<|assistant|>", "<|user|>", "<|system|>", "<|end|>"), "<|end|>", "<|end|>"),
    "cohere": Family(
        COHERE,
        ("<|turn|>", "<|assistant|>", "<|user|>", "<|system|>", "<|end_response|>"),
        "<|end_response|><|im_end|>",
        "<|end_response|><|im_end|>",
    ),
    "qwen3.5": Family(QWEN35, (), "<|im_end|>", "<|im_end|>"),
    "harmony": Family(
        HARMONY, ("<|start|>", "<|message|>", "<|end|>", "<|return|>"), "<|end|>", "<|return|>", lead="<|message|>"
    ),
}
