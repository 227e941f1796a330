"""The line's queue in Redis: leases with fencing tokens. All keys are listed here; the verbs are in trainer_verbs.py
and worker_verbs.py, and what must be atomic in the Lua beside them.

Every key begins with the line's prefix "{name}", one hash tag. Life: until the last ack of its rollout or group, unless
stated.

    schema          string   number of the line's message format; `rollout schema raise` raises it
    seq             counter  order in which groups were enqueued
    r:ID            hash     one rollout: env group lane order stage state token owner attempts:STAGE losses deaths
                             alone since entered waited worked restart payload sandbox place cancel overdue ttl
                             deadline
                             spent:STAGE; at its end outcome ended result, or kind why at log host exit
    a:ID            list     its attempts, JSON, the last 40
    p:ID:TOKEN      string   payload written by the holder of TOKEN (zstd msgpack); expires until a commit makes it stay
    t:GROUP         string   the task of a group (zstd msgpack); where a letter needs it, it outlives the last ack by
                             keep.dead_days. Each of the two may instead be the reference of a file under payload.dir
                             (path, size, digest)
    files           string   the line's folder under payload.dir, and who made it where (JSON)
    trash           zset     references of files whose keys went, by that time (ms): a worker removes them 10 s later
    g:GROUP         hash     samples asked lane order done left letters begun; wanted life rest, and usable closed part
                             clock spare, where it may close before all have ended
    m:GROUP         set      ids of the group that are not acked
    ready:STAGE:LANE zset    waiting rollouts by order (age of the group, moved by priority); STAGE done: to be popped
    place:LANE      zset     waiting rollouts of INIT that need a sandbox: for a host with a free place
    places          set      handlers whose rollouts need a sandbox, as INIT workers found
    lease:STAGE     zset     leased rollouts by the end of their lease (server ms)
    delayed:STAGE   zset     rollouts that wait for a retry, by due time (ms)
    groups:LANE     zset     complete groups, by order
    closing         zset     groups with a deadline by the time at which they close (ms)
    paused          hash     lane -> why nothing new of it begins at INIT (JSON)
    spare           hash     lane -> members of begun groups beyond the number with which those close
    due             zset     rollouts by the time their deadline or queue_ttl ends (ms)
    own:WORKER      set      ids that a worker or consumer holds; empty = gone
    died:WORKER     string   how many rollouts it held when its leases ran out; 1 h
    turn:STAGE      hash     lane -> credit of the weighted turn
    credit:STAGE    hash     the same, of older versions' claims; a string once the schema was raised, which stops them
    client:NAME     string   what a trainer's client says of itself (JSON); expires
    claim:W:STAGE   hash     last claim of a worker or client (nonce, what it got, the newest schema that it reads); 1 h
    bell:STAGE, bell:done:LANE, bell:place, bell:worker:W   lists   doorbells, 64 rings at most; a worker's 1 h
    dead:STAGE      zset     dead letters by time (ms); keep.dead_days
    letter:ID       hash     copy of a failed rollout for people; keep.dead_days
    gone:ID         string   tombstone of an acked rollout; keep.gone_hours
    workers, beats  hash, zset   what each worker says of itself (JSON), and when it last beat or ticked; 1 h
    counts          hash     enqueued acked live scored failed cancelled dropped committed:STAGE
                             attempt|loss|fatal|back:STAGE
    backends        zset     policy servers by the end of their lease (ms; inf: registered by hand)
    backend:ID      hash     url kind model tokenizer endpoint window version drained owner why
    policy          hash     version ordinal updates path; paused mode target pause_owner pause_until pauses; batch
                             max_staleness lane popped dropped
    versions        zset     weights' versions by the ordinal of their update; the newest 1,000
    loads           hash     RUN worker -> until when this holds (ms), the newest pause that it knows, its share: tokens
                             in flight, calls and rate by backend (JSON)
    started:LANE    set      rollouts of groups that INIT has begun, until their ack or an end without a score
    raise:ID        string   who changes this backend's weights now; expires
    other:NAME:backend:ID, other:NAME:backends, other:NAME:loads, other:NAME:policy   hash, zset   the same four keys
                             for the servers of another policy (section `policies`: a judge); it has no updates
    doctor:RUN      hash     notes by which the nodes of a `rollout doctor --cluster` find each other (JSON); 15 min
    tick, blind     strings  last tick; until when no lease expires (server ms)

Promise: at-least-once execution, exactly-once commit per (rollout, stage), bounded attempts, refusal instead of
dropping. Every verb may be sent again with the same arguments: its second answer says what the first one did.
"""

from __future__ import annotations

from pipeline.trainer_verbs import TrainerVerbs
from pipeline.worker_verbs import WorkerVerbs


class Queue(TrainerVerbs, WorkerVerbs):
    """The verbs, on one Redis. Each raises RedisUnavailable when Redis stays away for more than `patience` seconds."""
