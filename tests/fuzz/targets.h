// What each target runs and begins with; the files are named after them. Said in README.md.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/fuzz/target.h"

namespace gradwire::fuzz {

using Seeds = std::vector<std::vector<uint8_t>>;

void RunChunk(Input input);
Seeds ChunkSeeds();
void RunAssembler(Input input);
Seeds AssemblerSeeds();
void RunUpdate(Input input);
Seeds UpdateSeeds();
void RunParameters(Input input);
Seeds ParameterSeeds();
void RunIndex(Input input);
Seeds IndexSeeds();
void RunRunValues(Input input);
Seeds RunValueSeeds();
void RunIntegers(Input input);
Seeds IntegerSeeds();
void RunPlan(Input input);
Seeds PlanSeeds();
void RunMessage(Input input);
Seeds MessageSeeds();
void RunTcp(Input input);
Seeds TcpSeeds();
void RunJob(Input input);
Seeds JobSeeds();
void RunConfig(Input input);
Seeds ConfigSeeds();
void RunCodecSpec(Input input);
Seeds CodecSpecSeeds();
void RunAddress(Input input);
Seeds AddressSeeds();
void RunJournal(Input input);
Seeds JournalSeeds();
void RunSafetensors(Input input);
Seeds SafetensorsSeeds();
void RunSnapshot(Input input);
Seeds SnapshotSeeds();
void RunCheckpoint(Input input);
Seeds CheckpointSeeds();
void RunReplication(Input input);
Seeds ReplicationSeeds();
void RunNorms(Input input);
Seeds NormSeeds();
void RunStored(Input input);
Seeds StoredSeeds();
void RunLeaseObject(Input input);
Seeds LeaseObjectSeeds();
void RunEtcd(Input input);
Seeds EtcdSeeds();

}  // namespace gradwire::fuzz
