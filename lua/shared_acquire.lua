#!lua flags=allow-oom
--[[
shared_acquire: put the epoch of a shared group in force in one partition, or check that it is.

All members of the group share the epoch. The native consumer group is made where it is missing, at the first offset that
is not settled: what was settled above that comes again then. The lock comes last: where the call ends before it, the next
one does all of it again.

KEYS
  1 meta_key      hash    state, next and first offset of the partition; seal id
  2 log_key       stream  the partition's records, with the native consumer group
  3 lock_key      hash    owner ("shared"), epoch, committed, base, seek; shared: the native group's name
  4 attempts_key  hash    offset -> failed attempts and when (see shared_nack)
  5 due_key       zset    offset -> ms when it may be given again, inf: deferred
  6 queues_key    zset    deferred messages by class (see shared_defer)

ARGV
  1 group         string  the native consumer group
  2 epoch         int     the epoch that Postgres has for this group and partition
  3 start         int     offset at which the group starts here, used where nothing is committed yet
  4 seek          int     how often the group was sent elsewhere: what was committed before the last time is void
  5 afresh        int     1: make the native group where it is missing, also if the epoch is in force

RETURNS
  {"unchanged", committed, left, deferred}  in force; left: ms until something is to be given again, -1 where nothing is;
                               deferred: how many messages are
  {"acquired", committed}      in force now, and the native group is there
  {"drained", seal id}         everything before the command record of a sealed partition is settled
  {"fenced", epoch}            a higher epoch has been seen
  {"absent"}                   no such partition on this node, or its records are gone
]]
local meta_key = KEYS[1]
local log_key = KEYS[2]
local lock_key = KEYS[3]
local attempts_key = KEYS[4]
local due_key = KEYS[5]
local queues_key = KEYS[6]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local start = tonumber(ARGV[3])
local seek = tonumber(ARGV[4])
local afresh = ARGV[5] == '1'

local format = string.format

-- include settled_upto

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first', 'seal')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed', 'seek')
local held = tonumber(lock[2] or '0')
local in_force = held == epoch and lock[1] == 'shared'
if not in_force and held >= epoch then return {'fenced', held} end

local committed = tonumber(lock[3] or '0')
if in_force and not afresh then
  if meta[1] == 'sealed' then
    -- Who settled the last message may have ended before it could say so.
    if committed < next_offset then
      local upto = settled_upto(log_key, group, committed)
      if upto > committed then
        committed = upto
        redis.call('HSET', lock_key, 'committed', format('%d', committed), 'base', format('%d', committed))
      end
    end
    if committed >= next_offset then return {'drained', meta[4] or ''} end
  end
  local deferred = redis.call('ZCARD', queues_key)
  local head = redis.call('ZRANGEBYSCORE', due_key, '-inf', '(inf', 'WITHSCORES', 'LIMIT', 0, 1)
  if not head[1] then return {'unchanged', committed, -1, deferred} end
  local time = redis.call('TIME')
  local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
  return {'unchanged', committed, math.max(0, tonumber(head[2]) - now), deferred}
end

local is_there = redis.call('EXISTS', log_key) == 1
if next_offset > 1 and not is_there then return {'absent'} end
local native = false
for _, facts in ipairs(is_there and redis.call('XINFO', 'GROUPS', log_key) or {}) do
  for i = 1, #facts, 2 do native = native or (facts[i] == 'name' and facts[i + 1] == group) end
end
if tonumber(lock[4] or '0') < seek then
  if native then redis.call('XGROUP', 'DESTROY', log_key, group) end
  redis.call('DEL', attempts_key, due_key, queues_key)
  committed, native = 0, false
end
if committed == 0 then
  -- A partition that fell back below the start begins anew: what comes now is new to the group.
  committed = math.max(math.min(start, next_offset), tonumber(meta[3] or '1'))
end
if not native then
  -- What was back of a former native group is read anew: it must not be taken from whoever gets it then.
  redis.call('DEL', due_key, queues_key)
  redis.call('XGROUP', 'CREATE', log_key, group, format('%d-0', committed - 1), 'MKSTREAM')
end
redis.call('HSET', lock_key, 'owner', 'shared', 'epoch', format('%d', epoch), 'shared', group,
  'committed', format('%d', committed), 'base', format('%d', committed), 'seek', format('%d', seek))
return {'acquired', committed}
