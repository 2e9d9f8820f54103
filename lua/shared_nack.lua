#!lua flags=allow-oom
--[[
shared_nack: give messages of a shared group back, each to be given again after a wait.

A message that is not with this member any more is left alone. What is noted of one: failed attempts, ms of the first one
noted and of the last, and then s where an attempt is counted that was begun with care and has not ended, t where its member
was not heard of.

KEYS
  1 log_key       stream  the partition's records, with the native consumer group
  2 lock_key      hash    owner ("shared") and epoch
  3 attempts_key  hash    offset -> <failed attempts>:<ms of the first>:<ms of the last>[:s or :t]
  4 due_key       zset    offset -> ms when it may be given again

ARGV
  1 group         string  the native consumer group
  2 epoch         int     the epoch in force
  3 member        string  who gives them back
  4 count         int     1 to 500 messages
  5 ...           per message: offset, ms to wait, failed attempts by now (empty: as noted)

RETURNS
  {"returned", count}  so many were with this member, and may be given again
  {"fenced", epoch}   another epoch is in force; nothing was changed
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local attempts_key = KEYS[3]
local due_key = KEYS[4]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local member = ARGV[3]
local count = tonumber(ARGV[4])

local format = string.format
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
if count < 1 or count > 500 or #ARGV ~= 4 + 3 * count then
  return redis.error_reply('ERR shared_nack: 1 to 500 messages, three facts each')
end
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local done = 0
for i = 1, count do
  local offset, wait, attempts = ARGV[3 * i + 2], tonumber(ARGV[3 * i + 3]), ARGV[3 * i + 4]
  local id = offset .. '-0'
  local pending = redis.call('XPENDING', log_key, group, id, id, 1)[1]
  if pending and pending[2] == member then
    redis.call('ZADD', due_key, format('%d', now + wait), offset)
    if attempts ~= '' then
      local first = string.match(redis.call('HGET', attempts_key, offset) or '', '^%d+:(%d+)')
      redis.call('HSET', attempts_key, offset, format('%s:%s:%d', attempts, first or format('%d', now), now))
    end
    -- Last: what is with nobody and not due would never be given again.
    redis.call('XCLAIM', log_key, group, '-', 0, id, 'JUSTID')
    done = done + 1
  end
end
return {'returned', done}
