"""The `rollout` command, put together."""

from __future__ import annotations

import click

from workers.cli import (
    begin,
    change,
    gym,
    image,
    look,
    policy,
    pop,
    put,
    redis,
    run,
    sandbox,
    schema,
    serve,
    slurm,
    task,
    work,
)
from workers.cli.base import Group, setting_options

ABOUT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(cls=Group, params=setting_options(hidden=False), context_settings=ABOUT)
@click.version_option(package_name="rollout-line", prog_name="rollout")
def rollout() -> None:
    """An assembly line for rollouts: enqueue prompts, pop scored trajectories.

    Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted.
    """


for command in (
    begin.demo, begin.attempt, begin.init, begin.doctor,
    work.work, redis.redis, policy.policy, serve.serve, gym.gym, image.image, sandbox.sandbox,
    task.task, put.enqueue, pop.pop,
    look.watch, look.depth, look.ls, look.show, look.logs, look.workers, look.dead, look.audit,
    change.cancel, change.requeue, run.run, schema.schema, slurm.slurm,
):  # fmt: skip
    rollout.add_command(command)
