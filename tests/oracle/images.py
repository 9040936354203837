"""Images in the prompts of a world of the scheduler oracle.

All images of one length have the same placeholder tokens, so vLLM's hashes alone tell them apart. A
small encoder cache splits prompts before an image, and small steps split images.

A prompt with images is written with one number per token of an image, as the model sees it; vLLM
gets placeholders instead. A placeholder without its image, where a prompt was cut, is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from tests.oracle.features import Feature
from tests.oracle.forward import VOCABULARY
from tests.oracle.serving import PROMPT_MAX

if TYPE_CHECKING:
    from tests.oracle.mixed import MixedEngine

PLACEHOLDER = VOCABULARY - 1
LENGTHS = (3, 6, 9, 14)
TWINS = 2
"""The images of one length."""
ENCODER_TOKENS = (14, 20, 40)
FIRST = 1000
STRIDE = 100


def image_tokens(image: int) -> list[int]:
    """The tokens of an image, as the model sees them."""
    first = FIRST + STRIDE * image
    return list(range(first, first + LENGTHS[image // TWINS]))


class _Chat:
    """A prompt with images and the answer to it, which grows."""

    def __init__(self, prompt: list[int], request: Request) -> None:
        self._prompt = prompt
        self._request = request

    def _all(self) -> list[int]:
        return [*self._prompt, *self._request.output_token_ids]

    def __len__(self) -> int:
        return len(self._all())

    def __getitem__(self, part: slice) -> list[int]:
        return self._all()[part]


class Images(Feature):
    """About half of the prompts get an image, or another one where there was one."""

    def __init__(self, world: MixedEngine) -> None:
        super().__init__(world)
        self._seen: dict[str, list[int]] = {}
        self._of: dict[str, list[MultiModalFeatureSpec]] = {}
        self._encoded: set[str] = set()
        scheduler = world.scheduler
        scheduler.max_num_encoder_input_tokens = self.random.choice(ENCODER_TOKENS)
        size = self.random.choice(ENCODER_TOKENS)
        if scheduler.vllm_config.speculative_config is not None:
            # Draft layers read one token ahead: with an image that ends here, the next one is
            # needed, too. In a smaller cache vLLM would schedule nothing, forever.
            size = max(size, 2 * max(LENGTHS))
        scheduler.encoder_cache_manager = EncoderCacheManager(size)

    # -- a request -------------------------------------------------------------------------------

    def prompt(self, name: str, prompt: list[int]) -> list[int]:
        rng = self.random
        if rng.random() < 0.5:
            at = rng.randint(0, len(prompt))
            tokens = image_tokens(rng.randrange(TWINS * len(LENGTHS)))
            inside = at < len(prompt) and prompt[at] >= FIRST  # never in the middle of an image
            prompt = [*prompt, *tokens] if inside else [*prompt[:at], *tokens, *prompt[at:]]
            prompt = [*prompt[: PROMPT_MAX - 1], rng.randrange(VOCABULARY)]
        self._seen[name], self._of[name] = seen, features = [], []
        at, swap = 0, rng.random() < 0.2
        while at < len(prompt):
            image, offset = divmod(prompt[at] - FIRST, STRIDE)
            tokens = image_tokens(image) if image >= 0 else []
            if not tokens:
                seen.append(prompt[at])
                at += 1
            elif offset == 0 and prompt[at : at + len(tokens)] == tokens:
                if swap:
                    image = image // TWINS * TWINS + rng.randrange(TWINS)
                position = PlaceholderRange(len(seen), len(tokens))
                features.append(MultiModalFeatureSpec(None, "image", f"image {image}", position))
                seen += image_tokens(image)
                at += len(tokens)
            else:
                seen.append(PLACEHOLDER)
                at += 1
        return [min(token, PLACEHOLDER) for token in seen]

    def arguments(self, name: str) -> dict[str, Any]:
        return {"mm_features": list(self._of[name])}

    def made(self, request: Request) -> None:
        self.world.seen["images"] += len(request.mm_features)

    def sent(self, request: Request) -> Any:
        return _Chat(self._seen[request.request_id], request) if request.mm_features else None

    # -- the model runner ------------------------------------------------------------------------

    def content(self, name: str, tokens: Sequence[int]) -> Sequence[int]:
        prompt = self._seen[name]
        return [*prompt, *tokens[len(prompt) :]]

    def submitted(self, scheduled: SchedulerOutput) -> None:
        self._encoded.difference_update(scheduled.free_encoder_mm_hashes)
        for name, inputs in scheduled.scheduled_encoder_inputs.items():
            self._encoded.update(self._of[name][each].identifier for each in inputs)
            self.world.seen["encoded"] += len(inputs)

    def computes(self, name: str, start: int, end: int) -> None:
        for image in self._of[name]:
            first = image.mm_position.offset
            last = first + image.mm_position.length
            if start < last and first < end and image.identifier not in self._encoded:
                where = f"tokens {start} to {end} of request {name}"
                raise AssertionError(f"vLLM computes {where} without {image.identifier}")
            self.world.seen["begun inside"] += first < start < last

    def weights_changed(self) -> None:
        self.world.scheduler.reset_encoder_cache()
        self._encoded.clear()
