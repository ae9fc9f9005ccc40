"""What is not kept of NNHandler, and what to write instead."""

from __future__ import annotations

_PATCHES = (
    "Call the network on patches in a loss function of your own: set_loss_fn(loss), which is called with samples, "
    "equation, model and device."
)
_COPY = "Copy it from NNHandler's sources: it needs nothing else of NNHandler."
_CODE = "Keep the source of models beside the checkpoints; nothing in a checkpoint is run."


_NAMES_BY_REMEDY = {
    "Import it from torch.utils.tensorboard.": "SummaryWriter",
    "Write a Callback whose on_epoch_end(), under on_rank(0), draws what self.handler.module returns for a batch that "
    "you keep.": "BasePredictionVisualizer ImagePredictionVisualizer",
    "Write distman.data.Hdf5Dataset(path, [x_key, y_key]); set_train_loader() keeps each rank's shard in memory with "
    "dataloader_type=DataLoaderType.RANK_CACHED.": "H5LazyDataset RankMemCachedH5Dataset",
    "Write distman.data.distributed_loader(dataset, evaluation=...), or rank_cached_loader(), which keeps "
    "the shard in memory: they have the set_epoch() of a sampler.": """
        _create_distributed_loader _create_rank_cached_dataloader""",
    "Leave it out: each worker of a loader opens the file of a distman.data.Hdf5Dataset itself.": "h5_worker_init_fn",
    "Leave it out: the loaders of distman.data shuffle in each epoch.": "EpochShuffleSampler",
    "Leave it out: Python collects its garbage by itself, and torch uses a GPU's free memory again.": """
        SimpleGarbageCollector CudaGarbageCollector""",
    "Call getattr(distman.compat.nnhandler, name).": "str_to_callback",
    _COPY: "Scaler",
    f"{_COPY} ParamScheduler takes anything with get_value(epoch).": """
        Schedule ConstantSchedule LinearSchedule LogLinearSchedule CosineSchedule StepSchedule MultiStepSchedule""",
    "Import from torch: torch.amp.GradScaler and torch.amp.autocast are always there, and so is the average that "
    "train(ema_decay=...) keeps, handler.ema.": "import_with_fallback GradScaler autocast ExponentialMovingAverage",
    _PATCHES: """
        patch_denoising_score_matching patchify_denoising_score_matching patch_score_vectorized make_pos_grid
        patchify""",
    "Call handler.sample(), or distman.score.sample() with a score of your own.": """
        SdeSolver TSchedule get_t_schedule get_schedule_type""",
    "The networks of NNHandler are its own. Copy src/nn_handler/model_utils/autoencoders, under its licence.": """
        AutoEncoder AutoEncoderLoss AutoEncoderKL AutoEncoderKLLoss AutoencoderKL DCEncoder DCDecoder
        DiagonalGaussianDistribution vae_loss kl_beta_scheduler Encoder Decoder ResNetBlock AttentionBlock Downsample
        Upsample ConvNd ReLU2 LayerNorm RMSNorm SelfAttentionNd Patchify Unpatchify Shrink Dilate Residual ResBlock
        create_latent_dataset compute_vesde_sigma_max_robust""",
    "Call handler.train().": "train",
    "Call NNHandler.load() or NNHandler(...).": "load initialize initialize_from_checkpoint",
    "Call handler.save(path).": "save_single_file save_multi_files save_multi_from_single",
    "Call handler.auto_save(interval, save_path, name, overwrite).": "AutoSaver auto_save_epoch",
    _CODE: "load_model_code",
    "The command nn_handler_run is distman run -n 4 train.py, or distman launch, which writes job scripts.": "main",
    "Training steps are distman's own: see handler.distman, or write a loop over distman.data.distributed_loader.": """
        _prepare_batch _calculate_loss _calculate_metrics _train_step _val_step""",
    "Call ParallelExecutor(...).run(function).": "_parallel_worker",
    "Leave it out: collectives take tensors of any device.": "_collective_device_for_backend",
    "Call distman.split_sizes(total, world_size).": "_balanced_contiguous_shard _interleaved_indices",
}
REFUSED = {name: remedy for remedy, names in _NAMES_BY_REMEDY.items() for name in names.split()}
"""Names of the package that are not here."""

REFUSED_METHODS = {
    "set_model": "Make a new NNHandler, and load() into it what it shall take over.",
    "model_code": _CODE,
    "unwrap_model_dataparallel": "Leave it out: handler.module is the bare model.",
    "initialize": "Write NNHandler(...) and its set_ methods.",
    "initialize_logger": "Pass logger_mode to NNHandler, or call initialize_logger() of the package.",
    "make_pos_grid": _PATCHES,
    "patch_score_vectorized": _PATCHES,
}
"""Methods of NNHandler that are not here."""

_REFUSED_ARGUMENTS = {
    "save_model_code": "Keep the source of the model in a repository, beside the checkpoint.",
    "ddp_kwargs": "Of DistributedDataParallel's options, find_unused_parameters and broadcast_buffers can be set.",
    "debug_print_interval": "Add a Callback with on_train_batch_end(batch, logs), which has the loss of each batch.",
    "single_file": "Leave it out. Save weights by distman.checkpoint.save(handler.module.state_dict(), path).",
    "log_freq_epoch": "Each epoch is written.",
    "log_model_weights": "Add a ModelCheckpoint, whose files wandb.save() takes.",
    "log_y_scale": "Plot handler.train_metrics_history yourself.",
    "corrector_steps": "Leave it out and take more steps, or pass distman.score.sample() a score of your own.",
    **dict.fromkeys(["patch_size", "stride", "patch_chunk"], _PATCHES),
    "on_step": "Write the loop yourself, over handler.score(t, x).",
    **dict.fromkeys(["t0", "t1"], "The equation has its times: pass epsilon and horizon to it."),
}


def refuse(**arguments: object) -> None:
    """Raise for an argument that is given and cannot be kept, and say what to write instead."""
    for name, value in arguments.items():
        if value:
            raise TypeError(f"{name} must be left out, got {value!r}. {_REFUSED_ARGUMENTS[name]}")
