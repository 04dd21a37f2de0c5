/* A libnvidia-ml.so.1 of two GPUs. What they tell stands in the file NVML_FAKE, in lines "name gpu value". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned int uint;
typedef unsigned long long ull;
static int handles[2] = {0, 1};

/* The value, or -1 where the file has none: then the function is not supported. */
static long long look_up(const char *name, void *device) {
    FILE *file = fopen(getenv("NVML_FAKE"), "r");
    char word[80];
    int gpu;
    long long value, found = -1;
    while (file && fscanf(file, "%79s %d %lld", word, &gpu, &value) == 3)
        if (!strcmp(word, name) && (device == NULL || gpu == *(int *)device)) found = value;
    if (file) fclose(file);
    return found;
}
static int number(const char *name, void *device, uint *value) {
    long long found = look_up(name, device);
    if (found < 0) return 3; /* NVML_ERROR_NOT_SUPPORTED */
    *value = (uint)found;
    return 0;
}
static int large(const char *name, void *device, ull *value) {
    long long found = look_up(name, device);
    if (found < 0) return 3;
    *value = (ull)found;
    return 0;
}
int nvmlInit_v2(void) { return look_up("init", NULL) < 0 ? 0 : 9; /* NVML_ERROR_DRIVER_NOT_LOADED */ }
int nvmlDeviceGetCount_v2(uint *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(uint index, void **device) { *device = &handles[index]; return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, uint length) {
    snprintf(uuid, length, "GPU-%d0000000-aaaa", *(int *)device);
    return 0;
}
int nvmlDeviceGetName(void *device, char *name, uint length) {
    snprintf(name, length, "Fake %d", *(int *)device);
    return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, uint *rates) { rates[1] = 0; return number("busy", device, rates); }
int nvmlDeviceGetMemoryInfo(void *device, ull *memory) {
    memory[0] = 80ULL << 30;
    memory[1] = 0;
    return large("memory", device, memory + 2);
}
int nvmlDeviceGetPowerUsage(void *device, uint *value) { return number("milliwatts", device, value); }
int nvmlDeviceGetTotalEnergyConsumption(void *device, ull *value) { return large("millijoules", device, value); }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, ull *value) {
    if (look_up("lost", device) > 0) return 15; /* NVML_ERROR_GPU_IS_LOST */
    if (kind != 1 || counter != 0) return 2;    /* uncorrected, volatile */
    return large("ecc", device, value);
}
int nvmlDeviceGetRemappedRows(void *device, uint *corrected, uint *rows, uint *pending, uint *failed) {
    *corrected = 7;
    *pending = look_up("pending", device) > 0;
    *failed = look_up("failed", device) > 0;
    return number("rows", device, rows);
}
int nvmlDeviceGetCurrentClocksEventReasons(void *device, ull *value) { return large("reasons", device, value); }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, uint *value) { return number("width", device, value); }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, uint *value) { return number("most_width", device, value); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, uint *value) { return number("generation", device, value); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, uint *value) { return number("most_generation", device, value); }
struct field { uint field, scope; long long timestamp, latency; uint type, code; ull value; };
int nvmlDeviceGetFieldValues(void *device, int count, struct field *values) {
    uint action;
    if (count != 1 || values->field != 230) return 2; /* NVML_FI_DEV_GET_GPU_RECOVERY_ACTION */
    values->code = number("recovery", device, &action);
    values->value = action;
    return 0;
}
static int registered[2], next_event;
struct event { void *device; ull type, data; uint gpu_instance, compute_instance; };
int nvmlEventSetCreate(void **set) { *set = &next_event; return 0; }
int nvmlDeviceRegisterEvents(void *device, ull kinds, void *set) { registered[*(int *)device] = kinds == 8; return 0; }
/* One event for each line "xid gpu number" that was not told yet. */
int nvmlEventSetWait_v2(void *set, struct event *event, uint wait_ms) {
    FILE *file = fopen(getenv("NVML_FAKE"), "r");
    char word[80];
    int gpu, seen = 0;
    long long value;
    while (file && fscanf(file, "%79s %d %lld", word, &gpu, &value) == 3)
        if (!strcmp(word, "xid") && registered[gpu] && seen++ == next_event) {
            next_event++;
            event->device = &handles[gpu];
            event->type = 8;
            event->data = (ull)value;
            fclose(file);
            return 0;
        }
    if (file) fclose(file);
    return 10; /* NVML_ERROR_TIMEOUT */
}
