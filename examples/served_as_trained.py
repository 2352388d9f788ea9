"""Three steps of GRPO: samples of a server that has the trainer's float8 bytes, or 16-bit weights.

Needs transformers; runs on a CPU. After each step the server, transformers' own model, is loaded
from the stream that vLLM or SGLang would get. In the first run it multiplies the same bytes as the
trainer, and the same activations in float8: what it samples from is the policy that is trained. In
the second run it has the masters in bfloat16, as if the trainer were in 16 bits, too. Where all
ratios are 1 the loss is 0, as advantages of a group are on average; its gradient is not.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from float8 import Float8LinearConfig, convert_to_float8_training
from float8.checkpoints import float8_weights, quantization_config

logging.disable_progress_bar()
VOCABULARY, PROMPTS, SAMPLES, LENGTH = 64, 4, 4, 12
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
# Scales that are powers of two: casts have the same bytes, whether they divide or multiply.
BLOCKWISE = Float8LinearConfig.from_recipe_name("blockwise")
AS_SERVERS = replace(BLOCKWISE, round_scales_to_power_of_2=True)


def to_float8(model: nn.Module) -> nn.Module:
    """Convert all linear layers but the head."""
    body = lambda mod, fqn: fqn != "lm_head"  # noqa: E731
    return convert_to_float8_training(model, config=AS_SERVERS, module_filter_fn=body)


def new_server(policy: nn.Module, same_bytes: bool) -> nn.Module:
    """Load transformers' model from the weights of the policy."""
    state, config, more = policy.state_dict(), LlamaConfig(**SIZES), {}
    if same_bytes:
        state = dict(float8_weights(policy))
        config.quantization_config = quantization_config(policy)
        # On a CPU transformers loads values. The conversion casts them to the same bytes again.
        more["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    state = {name: x.detach().clone() for name, x in state.items()}
    server = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.bfloat16, **more
    )
    return (to_float8(server) if same_bytes else server).eval()


@torch.no_grad()
def sample(server: nn.Module, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Return samples [N, LENGTH], and the server's log probabilities of all tokens after each."""
    tokens = prompts.repeat_interleave(SAMPLES, 0)
    while tokens.shape[1] < LENGTH:
        probabilities = server(tokens).logits[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, probabilities.multinomial(1)], 1)
    return tokens, server(tokens).logits[:, :-1].float().log_softmax(-1)


def train(same_bytes: bool) -> list[float]:
    """Train three steps; return KL(trainer || server) of each, a mean over tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, initializer_range=0.08)
    policy = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    to_float8(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    found = []
    for step in range(3):
        server = new_server(policy, same_bytes)
        tokens, theirs = sample(server, torch.randint(VOCABULARY, (PROMPTS, 2)))

        reward = (tokens[:, 2:] < VOCABULARY // 2).float().mean(1)  # the task: small numbers
        groups = reward.view(PROMPTS, SAMPLES)
        advantage = groups - groups.mean(1, keepdim=True)
        advantage = (advantage / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)

        ours = policy(tokens).logits[:, :-1].float().log_softmax(-1)
        chosen = tokens[:, 1:, None]
        ratio = (ours.gather(2, chosen) - theirs.gather(2, chosen)).exp().squeeze(2)[:, 1:]
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        kl = (
            F.kl_div(theirs, ours.detach(), log_target=True, reduction="sum") / ours[..., 0].numel()
        )
        off = (ratio.detach() - 1).abs().max()  # 1: what was sampled is what is trained
        print(
            f"step {step}: reward {reward.mean():.3f}, loss {loss:+.4f}, "
            f"KL {kl:.1e}, ratios off by up to {off:.1e}"
        )
        found.append(kl.item())
    return found


def main() -> None:
    """Print both runs."""
    print("server with the trainer's bytes")
    same = train(same_bytes=True)
    print("server with weights in 16 bits")
    others = train(same_bytes=False)
    assert max(same) < min(others) / 10


if __name__ == "__main__":
    main()
