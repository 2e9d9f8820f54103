#!lua flags=allow-oom
--[[
shared_defer: give messages of a shared group back until it is their class's turn (see shared_deferred).

A deferred message is with nobody, and due never: its time in `due` is inf. `queues` is an index of these by class, and may
name messages that are deferred no more. It is written first, and the member comes last: where the call ends in between, the
message is still with this member, which gives it back.

KEYS
  1 log_key     stream  the partition's records, with the native consumer group
  2 lock_key    hash    owner ("shared") and epoch
  3 due_key     zset    offset -> ms when it may be given again, inf: deferred
  4 queues_key  zset    <length of class><class><offset, 16 digits>

ARGV
  1 group       string  the native consumer group
  2 epoch       int     the epoch in force
  3 member      string  who gives them back
  4 count       int     1 to 500 messages
  5 ...         per message: offset, class

RETURNS
  {"returned", count}  so many were with this member, and are deferred
  {"fenced", epoch}    another epoch is in force; nothing was changed
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local due_key = KEYS[3]
local queues_key = KEYS[4]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local member = ARGV[3]
local count = tonumber(ARGV[4])

local LOOK_LIMIT = 1000

-- include queue_prefix

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
if count < 1 or count > 500 or #ARGV ~= 4 + 2 * count then
  return redis.error_reply('ERR shared_defer: 1 to 500 messages, two facts each')
end
-- What this member has among them, in one look where it has little else between the first and the last.
local first, last = math.huge, 0
for i = 5, #ARGV, 2 do
  first, last = math.min(first, tonumber(ARGV[i])), math.max(last, tonumber(ARGV[i]))
end
local page = redis.call('XPENDING', log_key, group, string.format('%d-0', first), string.format('%d-0', last), LOOK_LIMIT, member)
local has = {}
for _, one in ipairs(page) do has[one[1]] = true end
local ids, index, due = {}, {}, {}
for i = 1, count do
  local offset, class = ARGV[2 * i + 3], ARGV[2 * i + 4]
  local id = offset .. '-0'
  if not has[id] and #page == LOOK_LIMIT then
    local pending = redis.call('XPENDING', log_key, group, id, id, 1)[1]
    has[id] = pending and pending[2] == member
  end
  if has[id] then
    ids[#ids + 1] = id
    index[#index + 1], index[#index + 2] = '0', queue_prefix(class) .. string.format('%016d', tonumber(offset))
    due[#due + 1], due[#due + 2] = 'inf', offset
  end
end
if #ids > 0 then
  local done = #ids
  redis.call('ZADD', queues_key, unpack(index))
  redis.call('ZADD', due_key, unpack(due))
  ids[done + 1] = 'JUSTID'
  redis.call('XCLAIM', log_key, group, '-', 0, unpack(ids))
  return {'returned', done}
end
return {'returned', 0}
