"""A tokenizer of bytes, two chat templates and a model to go with them, for tests of conversations."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from envsched_jax.policy.tokenizer import Tokenizer as Known
from envsched_jax.policy.transformer import TransformerConfig

CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# As Qwen3's: tools in a system message, results of one answer in one user turn, an empty thought where none is wanted.
MERGING = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- '<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last and not add_generation_prompt %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""


def tokenizer(template=CHATML, more_eos=()):
    """Ids 0 to 255 are bytes, 256 and 257 begin and end a message."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    encoder = Tokenizer(models.BPE(alphabet, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    marks = [AddedToken(text, special=True, normalized=False) for text in ("<|im_start|>", "<|im_end|>")]
    encoder.add_special_tokens(marks)
    end = encoder.token_to_id("<|im_end|>")
    assert (len(alphabet), end) == (256, 257)
    return Known(encoder, (*more_eos, end), template, {"eos_token": "<|im_end|>"})


CONFIG = TransformerConfig(
    vocab_size=258,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp_dim=24,
    qk_norm=True,
    blank_id=None,
)
