"""The clipped sum of one draw: chunks of samples in, one vector out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.mechanism import Mechanism
from modelmix.gradients import Batch, Engine
from modelmix.gradients.clip import Clip, ClippedSum
from modelmix.gradients.device import preserve_torch_rng, to_device_async
from modelmix.training.augment import Augment, apply_augmentation
from modelmix.training.embedding import Basis, Embedding, EmbeddingClip, find_basis
from modelmix.training.labels import Labels
from modelmix.training.randomness import StepRandomness
from modelmix.training.rules import Rule
from modelmix.training.sampling import Chunk


@dataclass(frozen=True)
class GradientSum:
    """Sum the clipped gradients of a draw.

    Guarantee: every sample of the chunks adds at most one clip, whatever the other samples are.

    Args:
        engine: computes per-sample gradients.
        clip: c; with an embedding c1, the bound of residuals.
        device: where the model is.
        rule: of the run; rules that prove nothing may clip otherwise.
        labels: lets samples with a label that the model has no output for count as zero; None where all were
            checked.
        augment: applied to every sample ``copies`` times; gradients are averaged over the copies before clipping.
        embedding: public samples in whose directions gradients are embedded.
        chunk: samples whose gradients are held at once.
    """

    engine: Engine
    clip: float
    device: torch.device
    rule: Rule
    labels: Labels | None
    augment: Augment
    embedding: Embedding | None
    chunk: int

    def clip_for(self, mechanism: Mechanism) -> Clip | EmbeddingClip:
        """Return how the proof of a mechanism asks gradients to be clipped."""
        if isinstance(mechanism, EmbeddingMechanism):
            return self.rule.bound(EmbeddingClip.of(mechanism, self.clip))
        return self.rule.bound(Clip.of(mechanism, self.clip))

    def __call__(
        self, chunks: Iterator[Chunk], parameters: dict[str, Tensor], mechanism: Mechanism, draws: StepRandomness
    ) -> ClippedSum:
        """Return the sum and what clipping met; with an embedding of residuals and noisy embeddings together."""
        clip = self.clip_for(mechanism)
        total = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64, device=self.device)
        generator = draws.generator("augment", self.device)
        parts: list[ClippedSum] = []
        with preserve_torch_rng(self.device):
            # Dropout and the like draw from torch's own generator; seeded here, they repeat when a run is resumed.
            torch.manual_seed(draws.generator("model").initial_seed())
            basis = None if self.embedding is None else self._find_basis(self.embedding, parameters, draws)
            embedded = 0 if basis is None else torch.zeros(basis.size, dtype=torch.float64, device=self.device)
            for chunk in chunks:
                batch = self._prepare(chunk, generator)
                if isinstance(clip, Clip):
                    parts.append(self.engine(parameters, batch, clip))
                else:
                    assert basis is not None
                    gradients = self.engine.gradients(parameters, batch)
                    more, part = clip.sum(gradients, basis, batch.sample_weights)
                    del gradients  # what layers saw, before the next chunk
                    embedded += more
                    parts.append(part)
                total += parts[-1].total
        if basis is not None and isinstance(clip, EmbeddingClip):
            noise = draws.gaussian("embedding noise", basis.size, self.device)
            total = total + basis.reconstruct(embedded + mechanism.noise_multiplier * clip.c0 * noise)
        return ClippedSum.concatenate(total, parts)

    def _prepare(self, chunk: Chunk, generator: torch.Generator) -> Batch:
        inputs, targets, weights = tree_map(
            lambda t: to_device_async(t, self.device), (chunk.inputs, chunk.targets, chunk.weights)
        )
        if self.labels is not None:
            targets, weights = self.labels.without_unknown(targets, weights)
        if self.augment.function is not None:
            copies = self.augment.copies
            inputs, targets = tree_map(lambda t: t.repeat_interleave(copies, 0), (inputs, targets))
            inputs = apply_augmentation(self.augment.function, inputs, generator)
        return Batch(inputs, targets, weights, self.augment.copies)

    def _find_basis(self, embedding: Embedding, parameters: dict[str, Tensor], draws: StepRandomness) -> Basis:
        """Find the basis of a step, from public samples and a released state alone."""
        chunks = embedding.chunks(self.chunk, self.device, padded=self.engine.fixed_shapes)
        public = (self.engine.gradients(parameters, Batch(x, y)).first(count) for x, y, count in chunks)
        layout = embedding.layout(sum(p.numel() for p in parameters.values()))
        return find_basis(layout, public, draws.generator("basis", self.device), self.engine.precision)
