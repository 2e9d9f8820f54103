#!lua flags=allow-oom
--[[
shared_attempt: count an attempt at a message of a shared group before it is started, since a former one may have ended its
process: one that does so every time comes to its last attempt although nobody ever answers.

KEYS
  1 log_key       stream  the partition's records, with the native consumer group
  2 lock_key      hash    owner ("shared") and epoch
  3 attempts_key  hash    offset -> failed attempts and when (see shared_nack)

ARGV
  1 group         string  the native consumer group
  2 epoch         int     the epoch in force
  3 member        string  who has it
  4 offset        int     the message

RETURNS
  {"started", attempts}  counted, this one included
  {"not_owner"}         others have it, or it is settled: do not start it
  {"fenced", epoch}     another epoch is in force; nothing was changed
]]
local log_key = KEYS[1]
local lock_key = KEYS[2]
local attempts_key = KEYS[3]
local group = ARGV[1]
local epoch = tonumber(ARGV[2])
local member = ARGV[3]
local offset = ARGV[4]

local format = string.format
local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= 'shared' or held ~= epoch then return {'fenced', held} end
local id = offset .. '-0'
local pending = redis.call('XPENDING', log_key, group, id, id, 1)[1]
if not pending or pending[2] ~= member then return {'not_owner'} end
local time = redis.call('TIME')
local now = format('%d', tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000))
local noted = redis.call('HGET', attempts_key, offset) or ''
local count, first = string.match(noted, '^(%d+):(%d+)')
count = tonumber(count or '0') + 1
redis.call('XCLAIM', log_key, group, member, 0, id, 'JUSTID')
redis.call('HSET', attempts_key, offset, format('%d:%s:%s:s', count, first or now, now))
return {'started', count}
