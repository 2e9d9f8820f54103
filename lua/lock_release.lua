#!lua flags=allow-oom
--[[
lock_release: give up the pull lock of one partition; its epoch stays, so that no older one comes back.

KEYS
  1 lock_key    hash    owner, epoch, last refresh, committed, base of the ack bitmap

ARGV
  1 member      string  who asks
  2 epoch       int     fencing epoch of its assignment

RETURNS
  {"released"}        it was ours
  {"fenced", epoch}   it was not; nothing was changed
]]
local lock_key = KEYS[1]
local member = ARGV[1]
local epoch = tonumber(ARGV[2])

local lock = redis.call('HMGET', lock_key, 'owner', 'epoch')
local held = tonumber(lock[2] or '0')
if lock[1] ~= member or held ~= epoch then return {'fenced', held} end
redis.call('HSET', lock_key, 'owner', '')
return {'released'}
