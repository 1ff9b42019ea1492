"""The loop that decodes a batch of responses, and which of them it feeds to the model.

All sequences of a forward pass stand at one position, as Megatron's cache demands. The batch therefore moves
along absolute positions: a response joins it at the end of its prompt and leaves it at its own end. Every
prompt is read in one pass, by all its responses at once, and no ended response is fed.

64 prompts of 40 to 400 tokens x 8 responses of 400 to 1200 tokens, a tenth of them 8192 long, take 8,606
passes over 0.87 million tokens. Prompts that start together and end apart would take 8,547 passes over 4.4
million, and a batch for each length of prompt 335,621 passes.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import Tensor

from tepo_nemo.nemo.rollout.kv_cache import KVCache
from tepo_nemo.rollout.protocol import Generation, GenerationRequest

# (tokens [S, L], first row in the cache, first position) -> logits [S, V_local] after the last token, or None
# on a pipeline stage that does not have them
Forward = Callable[[Tensor, int, int], Tensor | None]
# (logits of S rows or None, rows [S] of the request, positions [S] in their responses) -> tokens and
# log-probs, [S] each
Draw = Callable[[Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor]]


class Decoding:
    """One batch of responses.

    Args:
        request: its rows sorted by the length of the prompt.
        cache: has room for the request.
        forward, draw: see above; `forward` reads and writes `cache`.
        stop_token: id that ends a response.
        stop_check_interval: tokens between two looks at what was drawn, which wait for the device.
    """

    def __init__(
        self,
        request: GenerationRequest,
        cache: KVCache,
        forward: Forward,
        draw: Draw,
        *,
        stop_token: int,
        stop_check_interval: int,
        device: torch.device,
    ) -> None:
        self._request = request
        self._cache = cache
        self._forward = forward
        self._draw = draw
        self._stop_token = stop_token
        self._stop_check_interval = stop_check_interval
        self._device = device
        prompt_lengths = [len(prompt) for prompt in request.prompt_tokens]
        self._waiting = [
            list(rows) for _, rows in groupby(range(len(request)), key=prompt_lengths.__getitem__)
        ]
        self._prompt_lengths = torch.tensor(prompt_lengths, device=device)
        # Position of the last token that a row may have.
        self._last_position = [
            length + limit - 1
            for length, limit in zip(prompt_lengths, request.max_response_lengths, strict=True)
        ]
        shape = (len(request), max(request.max_response_lengths))
        self._tokens = torch.full(shape, stop_token, device=device)
        self._logprobs = torch.zeros(shape, device=device)
        # Of the responses in the batch, in the order of their rows at the front of the cache: the rows in the
        # request (on the host and on the device), the last tokens, and whether the stop token was among them.
        self._responding: list[int] = []
        self._rows = self._drawn = torch.zeros(0, dtype=torch.int64, device=device)
        self._stopped = torch.zeros(0, dtype=torch.bool, device=device)
        self._next_end = 0  # the first position at which one of them reaches its limit

    def run(self) -> Generation:
        """Decode until every response has ended."""
        position = 0
        while self._responding or self._waiting:
            if not self._responding:
                position = self._next_to_join()
            self._draw_at(position)
            if position % self._stop_check_interval == 0 or position >= self._next_end:
                self._drop_ended(position)
            position += 1
        return self._responses()

    def _next_to_join(self) -> int | None:
        """Position of the next responses to join; None when all have."""
        return len(self._request.prompt_tokens[self._waiting[0][0]]) if self._waiting else None

    def _draw_at(self, position: int) -> None:
        """Draw the token at a position, for the responses in the batch and for those that join it here."""
        logits = []
        if self._responding:
            logits.append(self._forward(self._drawn[:, None], 0, position - 1))
        if self._next_to_join() == position:
            logits.append(self._join(self._waiting.pop(0)))
        columns = position - self._prompt_lengths[self._rows]
        self._drawn, logprobs = self._draw(
            None if logits[0] is None else torch.cat(logits), self._rows, columns
        )
        self._tokens[self._rows, columns] = self._drawn
        self._logprobs[self._rows, columns] = logprobs
        self._stopped |= self._drawn == self._stop_token

    def _join(self, rows: list[int]) -> Tensor | None:
        """Read prompts of one length, each distinct one once; the logits [S, V_local] after each row's."""
        prompts: dict[tuple[int, ...], int] = {}
        owners = [prompts.setdefault(tuple(self._request.prompt_tokens[row]), len(prompts)) for row in rows]
        tokens = torch.tensor(list(prompts), device=self._device)
        owner = torch.tensor(owners, device=self._device)
        first = len(self._responding)
        logits = self._forward(tokens, first, 0)
        if len(prompts) < len(rows):
            targets = torch.arange(first, first + len(rows), device=self._device)
            self._cache.copy_rows(first + owner, targets, tokens.shape[1])
        self._stopped = torch.cat([self._stopped, self._stopped.new_zeros(len(rows))])
        self._set_responding(self._responding + rows)
        return None if logits is None else logits[owner]

    def _drop_ended(self, position: int) -> None:
        """Take the responses that end at a position or before it out of the batch."""
        ended = [
            stopped or self._last_position[row] <= position
            for row, stopped in zip(self._responding, self._stopped.tolist(), strict=True)
        ]
        living = [place for place, over in enumerate(ended) if not over]
        if len(living) == len(ended):
            return
        # The last of the living take the places of the ended, so that the cache stays full at the front. At
        # most as many rows move as end, each at the price of reading it once, as a step of attention does. It
        # pays at once: on skewed lengths this is 1 % of the time.
        holes = [place for place, over in enumerate(ended[: len(living)]) if over]
        movers = living[len(living) - len(holes) :]
        order = list(range(len(living)))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        places = torch.tensor(order, dtype=torch.int64, device=self._device)
        if holes:
            targets = torch.tensor(holes, device=self._device)
            self._cache.copy_rows(places[targets], targets, position)
        self._drawn, self._stopped = self._drawn[places], self._stopped[places]
        self._set_responding([self._responding[place] for place in order])

    def _set_responding(self, rows: list[int]) -> None:
        self._responding = rows
        self._rows = torch.tensor(rows, dtype=torch.int64, device=self._device)
        self._next_end = min((self._last_position[row] for row in rows), default=0)

    def _responses(self) -> Generation:
        """What was drawn, up to each response's end."""
        limits = torch.tensor(self._request.max_response_lengths, device=self._device)[:, None]
        columns = torch.arange(self._tokens.shape[1], device=self._device)
        stops = (self._tokens == self._stop_token) & (columns < limits)
        first_stop = torch.where(stops, columns, limits).amin(dim=1)
        lengths = torch.minimum(first_stop + 1, limits[:, 0])
        over = columns >= lengths[:, None]
        logprobs = self._logprobs.masked_fill(over, 0.0)
        if not bool(logprobs.isfinite().all()):
            raise FloatingPointError("the model's logits are not finite: its weights are broken")
        longest = int(lengths.max())
        return Generation(
            tokens=self._tokens.masked_fill(over, self._stop_token)[:, :longest].cpu(),
            lengths=lengths.cpu(),
            finished=(first_stop < limits[:, 0]).cpu(),
            logprobs=logprobs[:, :longest].cpu(),
        )
