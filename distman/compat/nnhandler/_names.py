"""What is not kept of NNHandler, and what to write instead."""

from __future__ import annotations

_COPY = "Copy it from NNHandler's sources: it needs nothing else of NNHandler."
_AUTOENCODERS = (
    "The networks of NNHandler are its own. Copy src/nn_handler/model_utils/autoencoders, under its licence."
)
_PATCHES = (
    "Call the network on patches in a loss function of your own: set_loss_fn(loss), which is called with samples, "
    "equation, model and device."
)
_LOGGER = "Write a Callback whose on_epoch_end(epoch, logs), under on_rank(0), gives logs to "
_HDF5 = (
    "Write distman.data.Hdf5Dataset(path, [x_key, y_key]); set_train_loader() keeps each rank's shard "
    "in memory with dataloader_type=DataLoaderType.RANK_CACHED."
)
_STEP = "Training steps are distman's own: see handler.distman, or write a loop over distman.data.distributed_loader."
_PICTURES = (
    "Write a Callback whose on_epoch_end(), under on_rank(0), draws what self.handler.module returns for a batch that "
    "you keep."
)

REFUSED = {
    **dict.fromkeys(
        ["TensorBoardLogger", "SummaryWriter"], f"{_LOGGER}torch.utils.tensorboard.SummaryWriter.add_scalar()."
    ),
    "WandbLogger": f"{_LOGGER}wandb.log().",
    **dict.fromkeys(["BasePredictionVisualizer", "ImagePredictionVisualizer"], _PICTURES),
    **dict.fromkeys(["H5LazyDataset", "RankMemCachedH5Dataset"], _HDF5),
    "h5_worker_init_fn": "Leave it out: each worker of a loader opens the file of a distman.data.Hdf5Dataset itself.",
    "EpochShuffleSampler": "Leave it out: the loaders of distman.data shuffle in each epoch.",
    "str_to_callback": "Call getattr(distman.compat.nnhandler, name).",
    "Scaler": _COPY,
    **dict.fromkeys(
        [
            "Schedule",
            "ConstantSchedule",
            "LinearSchedule",
            "LogLinearSchedule",
            "CosineSchedule",
            "StepSchedule",
            "MultiStepSchedule",
        ],
        f"{_COPY} ParamScheduler takes anything with get_value(epoch).",
    ),
    **dict.fromkeys(
        ["import_with_fallback", "GradScaler", "autocast", "ExponentialMovingAverage"],
        "Import from torch: torch.amp.GradScaler and torch.amp.autocast are always there, and so is the average that "
        "train(ema_decay=...) keeps, handler.ema.",
    ),
    **dict.fromkeys(
        [
            "patch_denoising_score_matching",
            "patchify_denoising_score_matching",
            "patch_score_vectorized",
            "make_pos_grid",
        ],
        _PATCHES,
    ),
    "patchify": _PATCHES,
    **dict.fromkeys(
        ["SdeSolver", "TSchedule", "get_t_schedule", "get_schedule_type"],
        "Call handler.sample(), or distman.score.sample() with a score of your own.",
    ),
    **dict.fromkeys(
        [
            "AutoEncoder",
            "AutoEncoderLoss",
            "AutoEncoderKL",
            "AutoEncoderKLLoss",
            "AutoencoderKL",
            "DCEncoder",
            "DCDecoder",
        ],
        _AUTOENCODERS,
    ),
    **dict.fromkeys(
        ["DiagonalGaussianDistribution", "vae_loss", "kl_beta_scheduler", "Encoder", "Decoder"], _AUTOENCODERS
    ),
    **dict.fromkeys(["ResNetBlock", "AttentionBlock", "Downsample", "Upsample", "ConvNd", "ReLU2"], _AUTOENCODERS),
    **dict.fromkeys(["LayerNorm", "RMSNorm", "SelfAttentionNd", "Patchify", "Unpatchify"], _AUTOENCODERS),
    **dict.fromkeys(["Shrink", "Dilate", "Residual", "ResBlock"], _AUTOENCODERS),
    **dict.fromkeys(["create_latent_dataset", "compute_vesde_sigma_max_robust"], _AUTOENCODERS),
    "train": "Call handler.train().",
    **dict.fromkeys(["load", "initialize", "initialize_from_checkpoint"], "Call NNHandler.load() or NNHandler(...)."),
    **dict.fromkeys(["save_single_file", "save_multi_files", "save_multi_from_single"], "Call handler.save(path)."),
    **dict.fromkeys(["AutoSaver", "auto_save_epoch"], "Call handler.auto_save(interval, save_path, name, overwrite)."),
    "load_model_code": "Keep the source of models beside the checkpoints; nothing in a checkpoint is run.",
    "main": "The command nn_handler_run is distman run -n 4 train.py, or distman launch, which writes job scripts.",
    **dict.fromkeys(["_prepare_batch", "_calculate_loss", "_calculate_metrics", "_train_step", "_val_step"], _STEP),
    "_parallel_worker": "Call ParallelExecutor(...).run(function).",
    "_collective_device_for_backend": "Leave it out: collectives take tensors of any device.",
    **dict.fromkeys(
        ["_balanced_contiguous_shard", "_interleaved_indices"], "Call distman.split_sizes(total, world_size)."
    ),
}
"""Names of the package that are not here."""

REFUSED_METHODS = {
    "set_model": "Make a new NNHandler, and load() into it what it shall take over.",
    "model_code": "Keep the source of models beside the checkpoints; nothing in a checkpoint is run.",
    "unwrap_model_dataparallel": "Leave it out: handler.module is the bare model.",
    "initialize": "Write NNHandler(...) and its set_ methods.",
    "initialize_logger": "Pass logger_mode to NNHandler, or call initialize_logger() of the package.",
    "make_pos_grid": _PATCHES,
    "patch_score_vectorized": _PATCHES,
}
"""Methods of NNHandler that are not here."""

REFUSED_ARGUMENTS = {
    "save_model_code": "Keep the source of the model in a repository, beside the checkpoint.",
    "ddp_kwargs": "Of DistributedDataParallel's options, find_unused_parameters and broadcast_buffers can be set.",
    "debug_print_interval": "Add a Callback with on_train_batch_end(batch, logs), which has the loss of each batch.",
    "single_file": "Leave it out. Save weights by distman.checkpoint.save(handler.module.state_dict(), path).",
    "log_y_scale": "Plot handler.train_metrics_history yourself.",
    "corrector_steps": "Leave it out and take more steps, or pass distman.score.sample() a score of your own.",
    "patch_size": _PATCHES,
    "stride": _PATCHES,
    "patch_chunk": _PATCHES,
    "on_step": "Write the loop yourself, over handler.score(t, x).",
    "t0": "The equation has its times: pass epsilon and horizon to it.",
    "t1": "The equation has its times: pass epsilon and horizon to it.",
}
"""Arguments that are not kept, where they are given."""
