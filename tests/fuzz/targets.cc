// The list of all targets; see target.h.
#include "tests/fuzz/targets.h"

#include "tests/fuzz/target.h"

namespace gradwire::fuzz {

std::span<const Target> Targets() {
  static constexpr Target kTargets[] = {
      {"chunk", RunChunk, ChunkSeeds, true},
      {"assembler", RunAssembler, AssemblerSeeds, true},
      {"update", RunUpdate, UpdateSeeds, true},
      {"parameters", RunParameters, ParameterSeeds, true},
      {"index", RunIndex, IndexSeeds},
      {"run_values", RunRunValues, RunValueSeeds},
      {"integers", RunIntegers, IntegerSeeds},
      {"plan", RunPlan, PlanSeeds},
      {"message", RunMessage, MessageSeeds},
      {"tcp", RunTcp, TcpSeeds},
      {"job", RunJob, JobSeeds},
      {"config", RunConfig, ConfigSeeds},
      {"codec_spec", RunCodecSpec, CodecSpecSeeds},
      {"address", RunAddress, AddressSeeds},
      {"journal", RunJournal, JournalSeeds},
      {"safetensors", RunSafetensors, SafetensorsSeeds},
      {"snapshot", RunSnapshot, SnapshotSeeds},
      {"checkpoint", RunCheckpoint, CheckpointSeeds},
      {"replication", RunReplication, ReplicationSeeds},
      {"norms", RunNorms, NormSeeds},
      {"stored", RunStored, StoredSeeds},
      {"lease_object", RunLeaseObject, LeaseObjectSeeds},
      {"etcd", RunEtcd, EtcdSeeds},
  };
  return kTargets;
}

const Target* FindTarget(std::string_view name) {
  for (const Target& target : Targets()) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

}  // namespace gradwire::fuzz
