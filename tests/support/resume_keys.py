"""A key of checkpoints, for tests to vary with ``dataclasses.replace``."""

from podtune.run.checkpoint import ResumeKey

KEY = ResumeKey(
    world_size=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=1,
    learning_rate=1e-3,
    warmup_steps=0,
    num_train_epochs=3.0,
    max_steps=-1,
    seed=42,
    max_length=1024,
    packing=False,
    strategy="ddp",
    lr_scheduler_type="linear",
    data="abc",
    model="m",
    use_peft=False,
)
