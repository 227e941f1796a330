"""Handler of the scaling benchmark: turns of a model call and of a command in a sandbox of its own."""

from __future__ import annotations

from array import array

from pipeline.interfaces import AgentHandler, Context

PROMPT = array("I", range(100, 1100))
"""A thousand ids: an agent's instructions."""
SEEN = array("I", range(200, 300))
"""What a command's output becomes: a hundred ids."""


class Agent(AgentHandler):
    """data: {"turns": n, "command": what the sandbox's shell runs after each reply}."""

    sandbox = {}  # noqa: RUF012 - as a user writes it
    eval_sandbox = "none"

    async def run(self, ctx: Context) -> None:
        await ctx.policy.ready()
        ctx.trajectory.prompt(PROMPT)
        for turn in range(int(ctx.task["turns"])):
            if turn:
                ctx.trajectory.observation(SEEN)
            said = await ctx.policy.generate(ctx.trajectory.ids, {"max_tokens": 64})
            ctx.trajectory.action(said.ids, said.logprobs, said.versions, finish_reason=said.finish_reason)
            done = await ctx.sandbox.bash(str(ctx.task["command"]))
            if done.exit_code != 0:
                raise RuntimeError(f"the command ended with {done.exit_code}: {done.text}")

    async def eval(self, ctx: Context) -> float:
        return 1.0
