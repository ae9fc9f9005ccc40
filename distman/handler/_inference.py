"""What a handler computes with its model without training it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from distman._seeds import seed_generators, seed_of
from distman.data._randomness import generators_preserved
from distman.handler._evaluation import evaluate, predict
from distman.handler._joint import joint
from distman.handler._loading import make_evaluation_loader
from distman.handler._model import TrainedModel
from distman.handler._setup import Setup
from distman.manager import DistributedManager

_VALIDATION = 1
"""Tells the seeds of validations from those of the training."""


class Inference(Setup):
    """Validation, prediction, and samples and densities of a score-based model.

    All of these use the moving average of the weights if one is kept; a call of the handler does not.
    """

    def __init__(self, model: TrainedModel, seed: int) -> None:
        super().__init__(model, seed)
        self._dtype: torch.dtype | None = None  # of mixed precision, as in the latest training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the bare model.

        Local.
        """
        return self.module(*args, **kwargs)

    @joint
    def validate(self) -> dict[str, float]:
        """Return the loss and the metrics over the validation data, the same on all ranks.

        Collective. Blocking. A loss that draws random numbers, as that of a score-based model does, draws the same ones
        in each validation; the training's are left alone.

        Raises:
            DistmanError: No data to validate with, or no loss function, has been set.
        """
        return self._evaluate(self._required_val_data())

    @joint
    def evaluate(self, data: Dataset[Any] | Iterable[Any], **loader_kwargs: Any) -> dict[str, float]:
        """Return the loss and the metrics over other data than those of :meth:`set_val_loader`, the same on all ranks.

        Collective. Blocking. Otherwise as :meth:`validate`; nothing of the training changes.

        Args:
            data: As for :meth:`set_val_loader`. Of an iterable, each rank's own batches count.
            loader_kwargs: Options of :func:`distman.data.distributed_loader` for a dataset; ``batch_size`` is 64 unless
                it is given.

        Raises:
            DistmanError: No loss function has been set.
            TypeError: The data or an option cannot be used.

        Example:
            >>> handler = NNHandler(torch.nn.Identity)
            >>> handler.set_loss_fn(torch.nn.functional.mse_loss)
            >>> handler.evaluate(TensorDataset(torch.zeros(10, 1), torch.ones(10, 1)))
            {'loss': 1.0}
        """
        return self._evaluate(make_evaluation_loader("evaluate", data, loader_kwargs))

    def _evaluate(self, data: Any) -> dict[str, float]:
        objective = self._required_objective()
        with generators_preserved(), self._model.evaluating() as model:
            seed_generators(seed_of(self._seed, DistributedManager().rank, _VALIDATION))
            return evaluate(model, objective, data, self._metrics, dtype=self._dtype, num_samples=self._num_samples)

    @joint
    def predict(
        self,
        data: Dataset[Any] | torch.Tensor | Iterable[Any],
        *,
        samples: Callable[[Any], Sequence[Any]] | None = None,
        pad: Callable[[list[torch.Tensor]], Any] | None = None,
        all_ranks: bool = False,
        **loader_kwargs: Any,
    ) -> Any:
        """Return the model's outputs for each sample, once and in order.

        Collective. Blocking. Outputs are tensors whose first dim is that of the samples, lists with one entry for each,
        or tuples, lists and mappings of such.

        Args:
            data: A dataset, the same on all ranks; a tensor of inputs, shape ``(n, *)``; or a loader, a stream, or
                another iterable of batches, each rank's own: then the outputs of rank 0 come first, and so on.
            samples: For outputs of another kind: takes those of a batch, in host memory, and returns one entry for each
                sample. The result is a list of these.
            pad: Takes a list of the tensors of all samples, and returns one of them all, where they differ in sizes,
                such as ``torch.nn.utils.rnn.pad_sequence``. None returns the list.
            all_ranks: Return the outputs on all ranks.
            loader_kwargs: Options of :func:`distman.data.distributed_loader` for a dataset or a tensor; ``batch_size``
                is 64 unless it is given.

        Returns:
            The outputs, in host memory, on rank 0; None elsewhere, and if there are no samples.

        Raises:
            TypeError: The data or an option cannot be used.
            ValueError: On a rank that found it: the outputs of two batches differ in structure, or some have not one
                entry for each sample.
            RankFailedError: On the other ranks.

        Example:
            >>> handler = NNHandler(torch.nn.Flatten)
            >>> handler.predict(torch.ones(100, 2, 2)).shape
            torch.Size([100, 4])
            >>> handler.predict(torch.ones(3, 2, 2), samples=lambda outputs: [one.sum().item() for one in outputs])
            [4.0, 4.0, 4.0]
        """
        dataset = TensorDataset(data) if isinstance(data, torch.Tensor) else data
        loader = make_evaluation_loader("predict", dataset, loader_kwargs)

        def forward(model: torch.nn.Module, batch: Any) -> Any:
            return self._forward(model, batch)[0]

        with self._model.evaluating() as model:
            return predict(model, forward, loader, samples=samples, pad=pad, all_ranks=all_ranks, dtype=self._dtype)

    def score(
        self, t: torch.Tensor, x: torch.Tensor, condition: torch.Tensor | None = None, *, guidance: float = 1.0
    ) -> torch.Tensor:
        """Return the estimated gradient of the log-density of the noisy data.

        Local.

        Args:
            t: Times, shape ``(batch,)``.
            x: Noisy samples, shape ``(batch, *)``.
            condition: Their conditions, shape ``(batch, *)``, for a conditional model.
            guidance: Scale of classifier-free guidance, see :func:`distman.score.score`.

        Returns:
            The score, shaped as ``x``.

        Raises:
            DistmanError: :meth:`set_sde` has not been called.
            ValueError: There is not one time for each sample, or the network returns a different shape.

        Example:
            >>> class Network(torch.nn.Module):
            ...     def forward(self, t, x):
            ...         return -x
            >>> handler = NNHandler(Network)
            >>> handler.set_sde("ve", sigma_max=10.0)
            >>> handler.score(torch.ones(1), torch.ones(1, 2))
            tensor([[-0.1000, -0.1000]])
        """
        conditions = () if condition is None else (condition,)
        return self._required_score_based().score(self._model.evaluated, t, x, *conditions, guidance=guidance)

    @joint
    def sample(self, shape: Sequence[int], **kwargs: Any) -> torch.Tensor:
        """Draw samples from a score-based model; the ranks share the work.

        Collective. Blocking.

        Args:
            shape: Shape of all samples, ``(n, *)``.
            kwargs: ``condition=`` and other options of :func:`distman.score.sample`, and the ``guidance=`` of
                :func:`distman.score.score`; with ``rank_zero=True`` only rank 0 works.

        Returns:
            The samples, on all ranks unless ``dst`` says otherwise.

        Raises:
            DistmanError: :meth:`set_sde` has not been called.
            ValueError, PlanMismatchError, RankFailedError: See :func:`distman.score.sample`.

        Example:
            >>> class Network(torch.nn.Module):
            ...     def forward(self, t, x):
            ...         return -x
            >>> handler = NNHandler(Network)
            >>> handler.set_sde("vp")
            >>> handler.sample((4, 2), num_steps=10, seed=0).shape
            torch.Size([4, 2])
        """
        with self._model.evaluating() as model:
            return self._required_score_based().sample(model, shape, **kwargs)

    @joint
    def log_likelihood(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the log-density of samples under a score-based model, in nats; the ranks share the work.

        Collective. Blocking.

        Args:
            x: The samples, shape ``(n, *)``, the same on all ranks.
            kwargs: Options of :func:`distman.score.log_likelihood`.

        Raises:
            DistmanError: :meth:`set_sde` has not been called.
            ImportError, ValueError, PlanMismatchError, RankFailedError: See :func:`distman.score.log_likelihood`.

        Example:
            >>> class Network(torch.nn.Module):
            ...     def forward(self, t, x):
            ...         return -x
            >>> handler = NNHandler(Network)
            >>> handler.set_sde("vp")
            >>> handler.log_likelihood(torch.zeros(4, 2), seed=0).shape
            torch.Size([4])
        """
        with self._model.evaluating() as model:
            return self._required_score_based().log_likelihood(model, x, **kwargs)
