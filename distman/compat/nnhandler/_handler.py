"""``nn_handler.NNHandler`` over distman's handler: what its model is used for, and its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from distman import checkpoint, score
from distman._torch_internals import tree_map
from distman.compat.nnhandler import _checkpoints, _kinds
from distman.compat.nnhandler._setup import refuse
from distman.compat.nnhandler._training import Training
from distman.handler._objective import evaluating


class NNHandler(Training):
    """A model and everything that its training needs, with the calls of NNHandler; distman's handler does the work.

    Collective. What is found neither here nor in distman's handler is looked for in the model.

    Args:
        model_class: The model's class.
        device: Device of a process that is alone; a rank of a job has that of its place on its host.
        logger_mode: Where rank 0 logs a line for each epoch; None for nowhere.
        logger_filename: The file.
        logger_filemode: How it is opened.
        logger_level: From which level on to log.
        save_model_code: Is refused.
        model_type: What the model is called with, and what its loss is.
        use_distributed: False is one process whatever the launcher says.
        ddp_kwargs: ``find_unused_parameters`` and ``broadcast_buffers``.
        model_kwargs: Arguments of the model's class.

    Attributes:
        distman: The handler that does the work, for what is not here.
    """

    LoggingMode = _kinds.LoggingMode
    ModelType = _kinds.ModelType

    def save(self, path: str | os.PathLike[str], single_file: bool = True) -> None:
        """Write the handler into a file, completely or not at all.

        Collective. Blocking: call it on all ranks. The loss function, metrics and callbacks themselves are left out.
        """
        refuse(single_file=not single_file)
        checkpoint.save({**self.distman.state_dict(), _checkpoints.KEY: _checkpoints.describe(self)}, path)

    load = _checkpoints.Load()

    initialize_from_checkpoint = classmethod(_checkpoints.initialize_from_checkpoint)

    def predict(self, data_loader: DataLoader[Any], apply_ema: bool = True) -> list[Any] | None:
        """Return the outputs of each batch, in the order of the dataset, on rank 0; None elsewhere.

        Collective. Blocking. The ranks share the work, whatever sampler the loader has.
        """
        size = data_loader.batch_size or 1
        outputs = self.distman.predict(data_loader.dataset, batch_size=size, collate_fn=data_loader.collate_fn)
        if self._rank:
            return None
        starts = range(0, len(data_loader.dataset), size)  # type: ignore[arg-type]  # what predict() takes has a length
        return [tree_map(lambda one, first=first: one[first : first + size], outputs) for first in starts]

    @property
    def sde(self) -> Any:
        """The equation of a score-based model."""
        return self._sde

    @sde.setter
    def sde(self, sde_instance: Any) -> None:
        self._sde, self._model_type = sde_instance, _kinds.ModelType.SCORE_BASED

    def set_sde(self, sde_class: Callable[..., Any], **sde_kwargs: Any) -> None:
        """Make the model a score-based one.

        Local.
        """
        self.sde = sde_class(**sde_kwargs)

    def score(self, t: torch.Tensor | float, x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Return the estimated gradient of the log-density of the noisy data.

        Local. Differentiable.

        Args:
            t: One time, or one for each sample.
            x: Noisy samples, shape ``(batch, *)``.
            args: What the model takes besides.
        """
        return self._score(self.module, t, x, *args)

    def _score(self, module: torch.nn.Module, t: torch.Tensor | float, x: torch.Tensor, *args: Any) -> torch.Tensor:
        x = x.to(self.device)
        times = torch.as_tensor(t, device=self.device).expand(len(x))
        if isinstance(self.sde, score.SDE):
            return score.score(lambda t, x: module(t, x, *args), self.sde, times, x)
        value: torch.Tensor = module(times, x, *args) / self.sde.sigma(times).view(-1, *[1] * (x.ndim - 1))
        return value

    def sample(
        self,
        shape: Sequence[int],
        steps: int,
        corrector_steps: int = 0,
        condition: Sequence[Any] | None = None,
        likelihood_score_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        guidance_factor: float = 1.0,
        apply_ema: bool = True,
        bar: bool = True,
        stop_on_NaN: bool = True,  # noqa: N803 - its name there
        patch_size: int | None = None,
        stride: int | None = None,
        patch_chunk: int | None = None,
        corrector_snr: float = 0.1,
        on_step: Callable[..., object] | None = None,
    ) -> torch.Tensor:
        """Draw samples by the reverse equation: the same on all ranks, which share the work if there is no condition.

        Collective. Blocking. Samples that are not finite are an error.

        Args:
            shape: Shape of the samples, ``(n, *)``.
            steps: Number of steps.
            corrector_steps: Is refused, as are the arguments from ``patch_size`` on.
            condition: What the model takes besides times and samples.
            likelihood_score_fn: A function of times and samples, whose value is added to the score.
            guidance_factor: The factor of that.
            apply_ema: Use the moving average of the weights, if there is one.
            bar: Makes no difference.
            stop_on_NaN: Makes no difference.
            patch_size: Is refused.
            stride: Is refused.
            patch_chunk: Is refused.
            corrector_snr: Is of no use without ``corrector_steps``.
            on_step: Is refused.

        Raises:
            TypeError: The equation is not one of :mod:`distman.score`.
        """
        refuse(corrector_steps=corrector_steps, patch_size=patch_size, stride=stride, on_step=on_step)
        refuse(patch_chunk=patch_chunk)
        self._check_sde("sample")
        module = self.ema if apply_ema and self.ema is not None else self.module

        def score_fn(t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            value = self._score(module, t, x, *(condition or ()))
            return value if likelihood_score_fn is None else value + guidance_factor * likelihood_score_fn(t, x)

        with evaluating(module):
            return score.sample(score_fn, self.sde, shape, num_steps=steps, rank_zero=bool(condition))

    def log_likelihood(
        self,
        x: torch.Tensor,
        *args: Any,
        ode_steps: int | None = None,
        n_cotangent_vectors: int = 1,
        noise_type: Literal["rademacher", "gaussian"] = "rademacher",
        method: str = "",
        t0: float | None = None,
        t1: float | None = None,
        apply_ema: bool = True,
        pbar: bool = False,
    ) -> torch.Tensor:
        """Return the log-density of samples, in nats, on all ranks, which share the work.

        Collective. Blocking. The steps of the solver are as many as its precision needs.

        Args:
            x: The samples, shape ``(n, *)``, the same on all ranks.
            args: What the model takes besides.
            ode_steps: Makes no difference.
            n_cotangent_vectors: Number of random vectors by which a trace is estimated.
            noise_type: Their distribution.
            method: Makes no difference.
            t0: Is refused, as is ``t1``.
            t1: Is refused.
            apply_ema: Use the moving average of the weights, if there is one.
            pbar: Makes no difference.

        Raises:
            TypeError: The equation is not one of :mod:`distman.score`.
        """
        refuse(t0=t0, t1=t1)
        self._check_sde("log_likelihood")
        module = self.ema if apply_ema and self.ema is not None else self.module
        with evaluating(module):
            return score.log_likelihood(
                lambda t, x: self._score(module, t, x, *args),
                self.sde,
                x,
                num_probes=n_cotangent_vectors,
                probes=noise_type,
            )

    def set_sampler(self, sampler_class: Callable[..., _kinds.Sampler], **sampler_kwargs: Any) -> None:
        """Set a way to draw samples.

        Local.
        """
        self.sampler = sampler_class(**sampler_kwargs)

    def get_samples(self, N: int, device: torch.device | str | None = None) -> Any:  # noqa: N803 - its name there
        """Return so many samples of the sampler, on rank 0; None elsewhere.

        Local.
        """
        if self.sampler is None:
            raise RuntimeError("the handler has no sampler. Call set_sampler() first.")
        return (
            None
            if self._rank
            else self.sampler.sample(N, device=self.device if device is None else torch.device(device))
        )

    def _check_sde(self, method: str) -> None:
        if not isinstance(self.sde, score.SDE):
            raise TypeError(
                f"sde must be an equation of distman.score for {method}(), got {self.sde!r}. Call "
                "set_sde(distman.score.VarianceExploding, sigma_max=...) or the like, or draw samples with your own "
                "loop over handler.score(t, x)."
            )
