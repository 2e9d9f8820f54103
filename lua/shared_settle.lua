#!lua flags=allow-oom
--[[
shared_settle: settle messages of a shared group, and move committed to the first offset that is not settled.

Idempotent; whoever handled a message may say so, also where others have it meanwhile. All calls carry the epoch in force,
so none of before a fall-back of the node settles a message that got an old offset.

It is told first, then acknowledged, then forgotten where it was noted: where the call ends in between, the same call again
does the rest, and may tell it twice.

Of an archived topic, what was not settled before is told in one entry of a stream, in the form of offsets_settle.

KEYS
  1 meta_key      hash    state and next offset of the partition
  2 log_key       stream  the partition's records, with the native consumer group
  3 lock_key      hash    owner ("shared"), epoch, committed; told
  4 attempts_key  hash    offset -> failed attempts and when (see shared_nack)
  5 due_key       zset    offset -> ms when it may be given again
  6 outcomes_key  stream  what became of offsets, until an archiver has fetched it

ARGV
  1 group         string  the native consumer group
  2 epoch         int     the epoch under which they were given
  3 member        string  who settles
  4 command       string  entry id of a command record that was read, or empty
  5 encoded_outcome string  empty: nothing is told; else as of offsets_settle: <entries kept at most>:<a letter per
                          range>:<last offset:how many ms ago it was given, by commas>
  6 range_count   int     0 to 500 ranges, of 1000 messages at most
  7 ...           per range: first offset, last offset

RETURNS
  {"settled", committed, count}   done; so many were not settled before
  {"fenced", epoch}               another epoch is in force; nothing was changed
  {"unknown", next}               an offset at or above next; nothing was changed
  {"absent"}                      no such partition on this node
]]
local meta_key = KEYS[1]
local log_key = KEYS[2]
local lock_key = KEYS[3]
local attempts_key = KEYS[4]
local due_key = KEYS[5]
local outcomes_key = KEYS[6]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local member = ARGV[3]
local command = ARGV[4]
local encoded_outcome = ARGV[5]
local range_count = tonumber(ARGV[6])

local LIMIT = 1000
local format = string.format

-- include settled_append
-- include expired_count
-- include range_add
-- include settled_upto

local meta = redis.call('HMGET', meta_key, 'state', 'next')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch', 'committed')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
local kept, letters, reads
if encoded_outcome ~= '' then
  kept, letters, reads = string.match(encoded_outcome, '^(%d+):([hue-]*):([%d:,]*)$')
  if not letters or #letters ~= range_count then return redis.error_reply('ERR shared_settle: a letter per range') end
end
local ids = {}
for i = 1, range_count do
  local first, last = tonumber(ARGV[2 * i + 5]), tonumber(ARGV[2 * i + 6])
  if first < 1 or last < first then return redis.error_reply('ERR shared_settle: bad range') end
  if last >= next_offset then return {'unknown', next_offset} end
  if #ids + last - first >= LIMIT then return redis.error_reply('ERR shared_settle: 1000 messages at most') end
  for offset = first, last do
    ids[#ids + 1] = format('%d-0', offset)
  end
end

-- What is settled by this call and no earlier one, by its letter: first and last offset in turn.
local fresh = {h = {}, u = {}, e = {}}
if letters then
  for i = 1, range_count do
    local line = fresh[string.sub(letters, i, i)]
    if line then
      local first, last = tonumber(ARGV[2 * i + 5]), tonumber(ARGV[2 * i + 6])
      local pending = redis.call('XPENDING', log_key, group, format('%d-0', first), format('%d-0', last), LIMIT)
      for _, one in ipairs(pending) do
        local offset = tonumber(string.match(one[1], '^%d+'))
        if string.sub(one[1], -2) == '-0' then range_add(line, offset, offset) end
      end
    end
  end
end
local failed = {}
local noted = #ids > 0 and redis.call('HLEN', attempts_key) > 0
local back = #ids > 0 and redis.call('ZCARD', due_key) > 0
local offsets = {}
if noted or back then
  for i, id in ipairs(ids) do offsets[i] = string.sub(id, 1, -3) end
end
if noted and letters then
  local counts = redis.call('HMGET', attempts_key, unpack(offsets))
  for i, offset in ipairs(offsets) do
    local count = counts[i] and string.match(counts[i], '^%d+') or '0'
    if count ~= '0' then failed[#failed + 1] = offset .. ':' .. count end
  end
end
settled_append(outcomes_key, lock_key, epoch, tonumber(kept), member, fresh, reads, failed)
expired_count(lock_key, fresh.e)
local count = 0
if #ids > 0 then count = redis.call('XACK', log_key, group, unpack(ids)) end
if command ~= '' then redis.call('XACK', log_key, group, command) end
if noted then redis.call('HDEL', attempts_key, unpack(offsets)) end
if back then redis.call('ZREM', due_key, unpack(offsets)) end

local committed = settled_upto(log_key, group, tonumber(lock[3]))
if committed > tonumber(lock[3]) then
  redis.call('HSET', lock_key, 'committed', format('%d', committed), 'base', format('%d', committed))
end
return {'settled', committed, count}
