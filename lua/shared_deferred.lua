#!lua flags=allow-oom
--[[
shared_deferred: give a member deferred messages of a shared group (see shared_defer), of one class after the other.

Each class has its first messages given, beginning behind the class that was given last. What the index names and is not
deferred any more is dropped from it.

KEYS
  1 log_key       stream  the partition's records, with the native consumer group
  2 lock_key      hash    owner ("shared") and epoch
  3 attempts_key  hash    offset -> failed attempts and when (see shared_nack)
  4 due_key       zset    offset -> ms when it may be given again, inf: deferred
  5 queues_key    zset    <length of class><class><offset, 16 digits>

ARGV
  1 group         string  the native consumer group
  2 epoch         int     the epoch in force
  3 member        string  who is to have them
  4 limit         int     1 to 500 messages
  5 each          int     messages of a class that is not named here
  6 after         string  class that was given last, with its length; empty: none
  7 ...           per named class: the class, and how many messages of it; up to 100

RETURNS
  {"due", {entry, ...}, {attempts, ...}, {offset, ...}, after, left}
                      as of shared_due; then the class that was given last, with its length, and how many the index has
  {"fenced", epoch}   another epoch is in force; nothing was changed
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local attempts_key = KEYS[3]
local due_key = KEYS[4]
local queues_key = KEYS[5]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local member = ARGV[3]
local limit = tonumber(ARGV[4])
local each = tonumber(ARGV[5])
local after = ARGV[6]

local LOOK_LIMIT = 200
local NAMED_LIMIT = 100

-- include queue_prefix
-- include due_claim

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
if limit < 1 or limit > 500 or #ARGV > 6 + 2 * NAMED_LIMIT then
  return redis.error_reply('ERR shared_deferred: 1 to 500 messages, 100 classes')
end
local most_of = {}
for i = 7, #ARGV, 2 do most_of[queue_prefix(ARGV[i])] = tonumber(ARGV[i + 1]) end

local found, looked, from = {}, {}, after == '' and '-' or '(' .. after .. ':'
for _ = 1, LOOK_LIMIT do
  if #found >= limit then break end
  local head = redis.call('ZRANGEBYLEX', queues_key, from, '+', 'LIMIT', 0, 1)[1]
  if head then
    local class = string.sub(head, 1, -17)
    if looked[class] then break end
    looked[class] = true
    local most = math.min(most_of[class] or each, limit - #found)
    if most > 0 then
      after = class
      for _, one in ipairs(redis.call('ZRANGEBYLEX', queues_key, '[' .. class .. '0', '(' .. class .. ':', 'LIMIT', 0, most)) do
        found[#found + 1] = one
      end
    end
    from = '(' .. class .. ':'
  elseif from == '-' then
    break
  else
    -- Round the end, to the first class.
    from = '-'
  end
end
local entries, notes, missing = {}, {}, {}
if #found == 0 then return {'due', entries, notes, missing, after, redis.call('ZCARD', queues_key)} end

local offsets, deferred = {}, {}
for i, one in ipairs(found) do offsets[i] = string.format('%d', tonumber(string.sub(one, -16))) end
for i, at in ipairs(redis.call('ZMSCORE', due_key, unpack(offsets))) do
  if at and tonumber(at) == math.huge then deferred[#deferred + 1] = offsets[i] end
end
if #deferred > 0 then entries, notes, missing = due_claim(log_key, attempts_key, due_key, group, member, deferred) end
redis.call('ZREM', queues_key, unpack(found))
return {'due', entries, notes, missing, after, redis.call('ZCARD', queues_key)}
