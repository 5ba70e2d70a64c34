"""A BLIP-2 of a tiny Llama that looks at images, seeded and written without any download."""

import base64
import io
import json
from pathlib import Path
from typing import Any

from tests.kit.tiny_kinds import COMMON_FIELDS, NUM_TOKENS, STD
from tests.kit.tiny_model import write_tokenizer

IMAGE_SIZE = 32
IMAGE_TOKEN = "<image>"
NUM_IMAGE_TOKENS = 48
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": 8,
}
_QFORMER = {
    "vocab_size": 4,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "encoder_hidden_size": 64,
}


def write_tiny_blip(folder: Path, seed: int = 0) -> Path:
    """Write configuration, weights, tokenizer and image processor; return the folder."""
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessor,
        PreTrainedTokenizerFast,
    )

    write_tokenizer(folder, NUM_TOKENS + 1)
    _name_image_token(folder)
    text = {**COMMON_FIELDS, "head_dim": 32, "vocab_size": NUM_TOKENS + 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Blip2Config(
            vision_config=_VISION,
            qformer_config=_QFORMER,
            text_config={**text, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
            num_query_tokens=NUM_IMAGE_TOKENS,
            image_token_index=NUM_TOKENS,
        )
        model = Blip2ForConditionalGeneration(config)
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.data.normal_(0.0, STD)
    model.save_pretrained(folder)
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor: Any = Blip2Processor(
        BlipImageProcessor(size=size),
        PreTrainedTokenizerFast.from_pretrained(folder),
        num_query_tokens=NUM_IMAGE_TOKENS,
    )
    processor.save_pretrained(folder)
    return folder


def _name_image_token(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(f'"<{NUM_TOKENS}>"', json.dumps(IMAGE_TOKEN)))


def image_url(red: int, green: int, blue: int) -> str:
    """A small image of one colour, as the address by which it is sent in a request."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), (red, green, blue)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
