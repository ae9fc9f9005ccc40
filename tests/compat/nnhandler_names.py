"""The names of NNHandler 0.6.33: those of its package by module, and the methods and attributes of its class."""

PUBLIC = {
    "": """NNHandler Sampler initialize_ddp on_rank parallelize_on_gpus ModelType LoggingMode DataLoaderType
        initialize_logger __version__""",
    "callbacks": """Callback ModelCheckpoint LearningRateMonitor TensorBoardLogger EpochTimer WandbLogger
        EarlyStopping SimpleGarbageCollector CudaGarbageCollector BasePredictionVisualizer
        ImagePredictionVisualizer str_to_callback ParameterNormMonitor ParamScheduler""",
    "checkpointing": """AutoSaver load_model_code load initialize initialize_from_checkpoint save_single_file
        save_multi_files save_multi_from_single auto_save_epoch""",
    "cli": "main",
    "dataloaders": """make_train_val_indices H5LazyDataset h5_worker_init_fn RankMemCachedH5Dataset
        EpochShuffleSampler _balanced_contiguous_shard _interleaved_indices""",
    "logger": "initialize_logger",
    "model_utils": """Sampler Schedule ConstantSchedule LinearSchedule LogLinearSchedule CosineSchedule
        StepSchedule MultiStepSchedule""",
    "model_utils.score_models": """denoising_score_matching patch_denoising_score_matching
        patchify_denoising_score_matching make_pos_grid patch_score_vectorized patchify TSchedule
        get_schedule_type get_t_schedule SdeSolver""",
    "model_utils.autoencoders": """AutoEncoder AutoEncoderLoss AutoEncoderKL AutoEncoderKLLoss Residual ResBlock
        DCEncoder DCDecoder ConvNd ReLU2 LayerNorm RMSNorm SelfAttentionNd Patchify Unpatchify Shrink Dilate
        DiagonalGaussianDistribution AutoencoderKL vae_loss kl_beta_scheduler Encoder Decoder ResNetBlock
        AttentionBlock Downsample Upsample create_latent_dataset compute_vesde_sigma_max_robust""",
    "trainer": "train _prepare_batch _calculate_loss _calculate_metrics _train_step _val_step",
    "utils": """import_with_fallback GradScaler autocast ExponentialMovingAverage ModelType LoggingMode
        DataLoaderType Scaler aggregate_loss aggregate_metrics""",
    "utils.ddp_decorators": """on_rank parallel_on_all_devices _parallel_worker _as_cpu ParallelExecutor
        parallelize_on_gpus""",
    "utils.ddp_helpers": """aggregate_metrics aggregate_loss broadcast_data broadcast_tensor broadcast_if_ddp
        _create_distributed_loader _create_rank_cached_dataloader _collective_device_for_backend""",
    "utils.ddp_init": """_should_use_distributed _is_env_distributed _first_host_from_slurm_nodelist
        _pick_device _initialize_distributed initialize_ddp _resolve_device""",
}
METHODS = """version device seed logger model module modules_always_eval model_kwargs complimentary_kwargs
        add_complimentary_kwargs model_code set_model unwrap_model_dataparallel optimizer set_optimizer
        scheduler set_scheduler sde set_sde sampler set_sampler get_samples loss_fn set_loss_fn
        pass_epoch_to_loss loss_fn_kwargs ema train_loader train_loader_kwargs set_train_loader val_loader
        val_loader_kwargs set_val_loader metrics add_metric clear_metrics train_losses val_losses
        train_metrics_history val_metrics_history save_interval save_path save_model_name overwrite_last_saved
        auto_save callbacks add_callback remove_callback clear_callbacks train monitor_keys save load
        initialize_from_checkpoint print freeze_module eval keep_eval_on_module count_parameters plot_losses
        plot_metrics compile_model score sample predict log_likelihood log warn raise_error initialize
        initialize_logger make_pos_grid patch_score_vectorized _rank _local_rank _world_size _device
        _distributed _stop_training _model _optimizer _scheduler _model_type _loss_fn _seed _sde _train_losses
        _val_losses _model_class"""
