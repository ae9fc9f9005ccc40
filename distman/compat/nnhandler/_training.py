"""The training of an NNHandler, its results, and what is saved while it runs."""

from __future__ import annotations

from pathlib import Path

from distman.compat.nnhandler._callbacks import Logs, with_suffix
from distman.compat.nnhandler._setup import Setup, refuse


class Training(Setup):
    """An NNHandler that can be trained."""

    def train(
        self,
        epochs: int,
        validate_every: int | None = 1,
        gradient_accumulation_steps: int = 1,
        use_amp: bool = False,
        gradient_clipping_norm: float | None = None,
        ema_decay: float = 0.0,
        seed: int | None = None,
        progress_bar: bool = True,
        debug_print_interval: int | None = None,
        save_on_last_epoch: bool = True,
        epoch_train_and_val_pbar: bool = False,
    ) -> None:
        """Train for so many epochs more. Steps whose loss or gradient is not finite are left out.

        Collective. Blocking.

        Args:
            epochs: Number of epochs.
            validate_every: Number of epochs from one validation to the next; 0 or None for none.
            gradient_accumulation_steps: Number of batches whose gradients make a step.
            use_amp: Mixed precision in float16, on a GPU.
            gradient_clipping_norm: Largest 2-norm of the gradient.
            ema_decay: Decay of a moving average of the weights, which are the model's in the end; 0 for none.
            seed: Seeds torch.
            progress_bar: Show a progress bar on a terminal.
            debug_print_interval: Is refused.
            save_on_last_epoch: Save after the last epoch too, if :meth:`auto_save` has been called.
            epoch_train_and_val_pbar: Makes no difference.
        """
        refuse(debug_print_interval=debug_print_interval)
        if seed is not None:
            self.seed = seed
        self._is_stopping, self._saves_last = False, save_on_last_epoch
        total = self._bridge.begin(epochs)
        try:
            self.distman.train(
                total,
                validate_every=validate_every or total + 1,
                accumulate=gradient_accumulation_steps,
                amp="fp16" if use_amp and self.device.type == "cuda" else None,
                clip_norm=gradient_clipping_norm,
                ema_decay=ema_decay or None,
                non_finite="skip",
                progress=None if progress_bar or epoch_train_and_val_pbar else False,
            )
        finally:
            self._bridge.phase = ""
        if self.ema is not None:
            self.module.load_state_dict(self.ema.state_dict())

    @property
    def _stop_training(self) -> bool:
        return self._is_stopping

    @_stop_training.setter
    def _stop_training(self, value: bool) -> None:
        self._is_stopping = bool(value)
        if value:
            self.distman.stop("a callback asked for it")

    def auto_save(
        self,
        interval: int | None,
        save_path: str = ".",
        name: str = "model_epoch{epoch:02d}",
        overwrite: bool = False,
    ) -> None:
        """Save the handler after every so many epochs.

        Local.

        Args:
            interval: Number of epochs; -1 is after the last one only, None or 0 never.
            save_path: The folder.
            name: Name of the file; names of results in braces are filled in.
            overwrite: Remove the file that was saved before.
        """
        self.save_interval, self.save_path = interval, save_path
        self.save_model_name, self.overwrite_last_saved = name, overwrite

    def _save_after(self, logs: Logs, *, is_last: bool) -> None:
        interval = self.save_interval
        if not interval or self.save_path is None:
            return
        if (interval > 0 and logs["epoch"] % interval == 0) or (is_last and (interval < 0 or self._saves_last)):
            path = Path(self.save_path) / with_suffix(self.save_model_name.format(**logs))
            self.save(path)
            if self.overwrite_last_saved and self._last_saved not in (None, path) and self._rank == 0:
                Path(self._last_saved or path).unlink(missing_ok=True)
            self._last_saved = path

    @property
    def train_losses(self) -> list[float]:
        """Mean training loss of each epoch."""
        return self.distman.train_losses

    @property
    def val_losses(self) -> list[float]:
        """Mean validation loss of each epoch; NaN for epochs without validation."""
        return self.distman.val_losses

    _train_losses, _val_losses = train_losses, val_losses

    @property
    def train_metrics_history(self) -> dict[str, list[float]]:
        """Each metric of the training, of each epoch."""
        return {name: self.distman.history[name] for name in self.metrics}

    @property
    def val_metrics_history(self) -> dict[str, list[float]]:
        """Each metric of the validation, of each epoch."""
        return {name: self.distman.history[f"val_{name}"] for name in self.metrics}

    def monitor_keys(self) -> list[str]:
        """Return the names of the results of an epoch."""
        return ["loss", "val_loss", "epoch_time", "lr", *self.metrics, *(f"val_{name}" for name in self.metrics)]

    def plot_losses(self, log_y_scale: bool = False, save_path: str | None = None) -> None:
        """Plot the losses into a file, on rank 0.

        Collective.
        """
        self.distman.plot_losses(_path_of_plot(save_path), log=log_y_scale)

    def plot_metrics(self, log_y_scale: bool = False, save_path_prefix: str | None = None) -> None:
        """Plot each metric into a file of its own, on rank 0.

        Collective.
        """
        refuse(log_y_scale=log_y_scale)
        prefix = _path_of_plot(save_path_prefix)
        for name in self.metrics:
            there = [one for one in (name, f"val_{name}") if one in self.distman.history.names]
            self.distman.plot_metrics(f"{prefix}_metric_{name}.png", there)


def _path_of_plot(path: str | None) -> str:
    if path is None:
        raise TypeError("the path of the plot must be given, got None. Pass a file: nothing is shown on a screen.")
    return path
