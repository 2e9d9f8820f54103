-- protocol 2
-- Outbox rows have no primary key. In a publication FOR ALL TABLES, Postgres refuses to change rows of such a table:
-- neither a recovery nor `mqlayer outbox adopt` could number the rows anew.
ALTER TABLE mqlayer_app.outbox_0 REPLICA IDENTITY USING INDEX outbox_0_key;
ALTER TABLE mqlayer_app.outbox_1 REPLICA IDENTITY USING INDEX outbox_1_key;
ALTER TABLE mqlayer_app.outbox_2 REPLICA IDENTITY USING INDEX outbox_2_key;
ALTER TABLE mqlayer_app.outbox_3 REPLICA IDENTITY USING INDEX outbox_3_key;
