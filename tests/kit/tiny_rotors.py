"""Weights of a tiny gated delta net whose two most likely tokens are 20 nats apart.

vLLM computes such models on CPUs in bfloat16 only, and a prompt in one step or in two by kernels
that round differently: of drawn weights, three answers of four differ within 64 tokens. Here every
sum has one term, which no rounding turns into another token."""

from typing import Any

NUM_CODES = 128
FIRST, NUM_SPOKEN = ord(" "), 95


def draw_rotors(model: Any, _kind: object, _seed: int) -> None:
    """Let a model of the kind qwen3next walk as a rotor router: after a token it says the one
    behind that which came after it the last time, or else the one behind itself. Where a step is
    missing from its state, the walk goes elsewhere.

    Half of the hidden state is the last token, one-hot. Every head keeps for each token the one to
    come, and the one head that a token belongs to writes it to the other half, four times as large.
    Attention and experts add nothing."""
    import torch
    from torch.nn.functional import pad

    one, nothing = torch.eye(NUM_CODES), torch.zeros(NUM_CODES, NUM_CODES)
    behind = one[:, FIRST + (torch.arange(NUM_CODES) - FIRST + 1) % NUM_SPOKEN]
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data.zero_()
    layers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    heads = torch.arange(len(layers) * layers[0].num_v_heads)
    gates = (torch.arange(NUM_CODES) % len(heads) == heads[:, None, None]).expand(-1, NUM_CODES, -1)
    for layer, opens in zip(layers, gates.float().chunk(len(layers)), strict=True):
        groups = opens.chunk(layer.num_k_heads)
        rows = [(one, one, *[behind] * len(group), *group) for group in groups]
        of_last = torch.cat([torch.cat(row) for row in rows])
        layer.in_proj_qkvz.weight.data.copy_(pad(of_last, (0, NUM_CODES)))
        always = torch.tensor([[2.0] * len(group) + [0.0] * len(group) for group in groups])
        of_last = always.view(-1, 1).expand(-1, NUM_CODES)
        layer.in_proj_ba.weight.data.copy_(pad(of_last, (0, NUM_CODES)))
        layer.dt_bias.data.fill_(-20.0)  # nothing fades
        keys = torch.arange(layer.conv_dim) // layer.key_dim == 1  # of the token before
        layer.conv1d.weight.data.copy_(one[:, None, :4][torch.where(keys, 2, 3)])
        recalled = torch.cat([nothing, one * 4 / (16 * NUM_CODES**0.5)])
        layer.out_proj.weight.data.copy_(recalled.repeat(1, len(opens)))
    num_tokens = model.config.vocab_size
    codes = pad(one, (0, NUM_CODES)).repeat(3, 1)[:num_tokens]
    model.model.embed_tokens.weight.data.copy_(codes)
    told = pad(torch.cat([behind, one], 1), (0, 0, 0, num_tokens - NUM_CODES))
    model.lm_head.weight.data.copy_(2 * told)
