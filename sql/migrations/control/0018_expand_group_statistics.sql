-- A group that is younger than a table's statistics counts for the planner as one without rows there: every index that
-- begins with the group looks equally good then, and it took the smallest, which goes through all that the group has
-- there for each message. Without statistics of the column it counts every group as a two-hundredth of the table.

ALTER TABLE mqlayer.parked_message ALTER COLUMN group_id SET STATISTICS 0;
ALTER TABLE mqlayer.dead_message ALTER COLUMN group_id SET STATISTICS 0;
ALTER TABLE mqlayer.failed_attempt ALTER COLUMN group_id SET STATISTICS 0;
